//! Proposed configurations: groups of made-up nodes, and that a proposal selects exactly what it says.

use spurline_fabric::{HostTree, Severity, TreeEntry};
use spurline_kube_devices::discover::{DiscoveryReport, discover};
use spurline_kube_devices::{NodeHcas, lint_config, read_config, select_hcas};
use spurline_testkit::hosts;
use spurline_testkit::hosts::Made;

fn node(made: &Made) -> NodeHcas {
    NodeHcas::read_from(&HostTree::from_memory(made.entries(TreeEntry::File, TreeEntry::Link)))
}

fn groups(report: &DiscoveryReport) -> Vec<(&str, Vec<String>)> {
    report.groups.iter().map(|g| (g.resource.as_str(), g.hcas.values().flatten().cloned().collect())).collect()
}

#[test]
fn rails_and_storage_bonds_are_apart() {
    let gb200 = node(&hosts::gb200());
    let report = discover(std::slice::from_ref(&gb200), 64);
    assert_eq!(
        groups(&report),
        [
            ("rdma/ib", ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"].map(String::from).to_vec()),
            ("rdma/roce_bond", ["mlx5_bond_0", "mlx5_bond_1"].map(String::from).to_vec()),
        ]
    );
    assert_eq!(report.config["configList"][0]["rdmaHcaMax"], 256);
    assert_eq!(report.config["configList"][1]["selectors"]["linkTypes"][0], "ether");
    assert!(report.groups.iter().all(|g| g.why.contains("select exactly these")), "{report:?}");
}

#[test]
fn management_devices_are_named_and_get_no_resource() {
    let xdr = node(&hosts::xdr());
    let report = discover(std::slice::from_ref(&xdr), 64);
    assert_eq!(groups(&report), [("rdma/ib", vec!["mlx5_0".to_owned()])]);
    assert!(report.groups[0].why.contains("select exactly these"), "{report:?}");
    let left: Vec<(&str, bool)> =
        report.left_out.iter().map(|l| (l.hca.as_str(), l.why.contains("management device (SMI) of mlx5_0"))).collect();
    assert_eq!(left, [("smi0", true)]);
    // A plugin that looks again finds nothing new.
    let tree = HostTree::from_memory(hosts::xdr().entries(TreeEntry::File, TreeEntry::Link));
    assert_eq!(xdr.refresh(&tree), xdr);
}

#[test]
fn every_host_gets_a_configuration_that_lints_without_errors_and_selects_its_groups() {
    for (name, made) in hosts::all() {
        let node = node(&made);
        let report = discover(std::slice::from_ref(&node), 16);
        if node.hcas.is_empty() {
            assert!(report.groups.is_empty());
            continue;
        }
        let text = report.config.to_string();
        let findings = lint_config(&text, "config.json", &node);
        assert!(findings.iter().all(|f| f.severity != Severity::Error), "{name}: {findings:?}");
        let config = read_config(&text, "config.json").config.unwrap();
        assert_eq!(config.resources.len(), report.groups.len(), "{name}");
        for (resource, group) in config.resources.iter().zip(&report.groups) {
            let selected: Vec<String> =
                select_hcas(&node, &resource.selectors).iter().map(|h| h.name.clone()).collect();
            let meant: Vec<String> = group.hcas.values().flatten().cloned().collect();
            assert_eq!(selected, meant, "{name}: {}", resource.resource());
        }
    }
}

#[test]
fn one_configuration_serves_nodes_that_differ() {
    let nodes: Vec<NodeHcas> =
        [hosts::gb200(), hosts::roce_jumbo(), hosts::vpi_ethernet(), hosts::plain()].iter().map(node).collect();
    let report = discover(&nodes, 8);
    let config = read_config(&report.config.to_string(), "config.json").config.unwrap();
    for node in &nodes {
        let mut claimed: Vec<&str> = Vec::new();
        for resource in &config.resources {
            claimed.extend(select_hcas(node, &resource.selectors).iter().map(|h| h.name.as_str()));
        }
        claimed.sort_unstable();
        let mut all: Vec<&str> = node.hcas.iter().map(|h| h.name.as_str()).collect();
        all.sort_unstable();
        assert_eq!(claimed, all, "{}: each HCA once\n{:#}", node.label(), report.config);
    }
    // InfiniBand of 400 and of 200 Gb/s are different resources.
    let names: Vec<&str> = report.groups.iter().map(|g| g.resource.as_str()).collect();
    assert!(names.contains(&"rdma/ib_400g") && names.contains(&"rdma/ib_200g"), "{names:?}");
}

#[test]
fn a_rail_that_is_down_stays_in_its_resource() {
    let mut made = hosts::gb200();
    let port = "sys/devices/pci0002:03/0002:03:00.0/infiniband/mlx5_1/ports/1";
    assert!(made.files.contains_key(&format!("{port}/rate")), "{:?}", made.files.keys());
    made.put(&format!("{port}/state"), "1: DOWN").put(&format!("{port}/rate"), "10 Gb/sec (4X SDR)");
    let node = node(&made);
    let report = discover(std::slice::from_ref(&node), 64);
    let names: Vec<&str> = report.groups.iter().map(|g| g.resource.as_str()).collect();
    assert_eq!(names, ["rdma/ib", "rdma/roce_bond"]);
    assert_eq!(report.groups[0].hcas["gb200-01"].len(), 4);
    assert!(report.notes.iter().any(|n| n.contains("mlx5_1 on gb200-01 has no active port")), "{:?}", report.notes);
    let findings = lint_config(&report.config.to_string(), "config.json", &node);
    assert!(findings.iter().all(|f| f.id != "K8S-MIXED-HCAS"), "{findings:?}");
}

#[test]
fn rails_on_ethernet_share_a_resource_whose_reason_names_the_chance() {
    let report = discover(&[node(&hosts::gb200())], 8);
    let why = |resource: &str| &report.groups.iter().find(|g| g.resource == resource).unwrap().why;
    assert!(why("rdma/roce_bond").contains("may get one that it has no interface on"), "{}", why("rdma/roce_bond"));
    assert!(!why("rdma/ib").contains("no interface"), "{}", why("rdma/ib"));
}

#[test]
fn a_standby_is_noted_and_omni_path_is_a_network_of_its_own() {
    let bonded = discover(&[node(&hosts::bond_of_two_cards())], 8);
    assert_eq!(groups(&bonded), [("rdma/roce_bond", ["mlx5_1", "mlx5_3"].map(String::from).to_vec())]);
    assert!(bonded.notes.iter().any(|n| n.starts_with("mlx5_3 on bond-01 is the standby")), "{:?}", bonded.notes);
    let both = discover(&[node(&hosts::omni_path()), node(&hosts::cloud_ipoib())], 8);
    let names: Vec<&str> = both.groups.iter().map(|g| g.resource.as_str()).collect();
    assert_eq!(names, ["rdma/ib_vf", "rdma/opa"]);
}

#[test]
fn an_hca_without_a_device_node_is_left_out_with_its_reason() {
    let mut made = hosts::roce_jumbo();
    made.remove("sys/class/infiniband_verbs");
    let report = discover(&[node(&made)], 8);
    assert!(report.groups.is_empty());
    assert_eq!((report.left_out[0].hca.as_str(), report.left_out[0].node.as_str()), ("mlx5_0", "roce-01"));
    assert!(report.left_out[0].why.contains("ib_uverbs"));
}
