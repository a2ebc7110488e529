//! Facts of made-up hosts: what a reader finds, and that nothing makes it panic.

use proptest::prelude::*;
use spurline_fabric::{GidType, HostFacts, HostTree, LinkLayer, ManagementDevice, PhysState, PortState, TreeEntry};
use spurline_testkit::hosts;
use spurline_testkit::hosts::Made;
use std::collections::BTreeMap;

fn read(made: &Made) -> HostFacts {
    HostFacts::read_from(&HostTree::from_memory(made.entries(TreeEntry::File, TreeEntry::Link)))
}

/// Device, port, link layer, first interface.
fn ports(host: &HostFacts) -> Vec<(String, u32, LinkLayer, Option<String>)> {
    let all = host.devices.iter().flat_map(|d| d.ports.iter().map(move |p| (d, p)));
    all.map(|(d, p)| (d.name.clone(), p.number, p.link_layer, p.netdevs.first().cloned())).collect()
}

#[test]
fn a_node_with_four_rails_and_two_bonds() {
    let host = read(&hosts::gb200());
    let found = ports(&host);
    let ib: Vec<_> = found.iter().filter(|p| p.2 == LinkLayer::InfiniBand).filter_map(|p| p.3.as_deref()).collect();
    assert_eq!(ib, ["ibp3s0", "ibP2p3s0", "ibP16p3s0", "ibP18p3s0"]);
    let bonds: Vec<_> = found.iter().filter(|p| p.2 == LinkLayer::Ethernet).filter_map(|p| p.3.as_deref()).collect();
    assert_eq!(bonds, ["bond0", "bond1"]);
    let pci = host.devices[0].pci.as_ref().unwrap();
    assert_eq!((pci.known_model, pci.numa_node, pci.width), (Some("ConnectX-7 MT2910"), Some(0), Some(16)));
    let bond = host.interface("bond0").unwrap();
    assert_eq!(bond.bond_mode.as_deref(), Some("802.3ad"));
    let members: Vec<_> = host.physical_interfaces(bond).iter().map(|i| i.name.as_str()).collect();
    assert_eq!(members.len(), 2, "{members:?}");
    assert_eq!(host.ports_of(bond)[0].0.name, "mlx5_bond_0");
    let gids = &host.devices.iter().find(|d| d.name == "mlx5_bond_0").unwrap().ports[0].gids;
    assert_eq!(gids.iter().map(|g| g.kind).collect::<Vec<_>>()[2..], [GidType::RoceV1, GidType::RoceV2]);
    assert_eq!(gids[3].ip_address().to_string(), "10.20.0.1");
    assert!(gids[3].is_routable() && !gids[1].is_routable());
}

#[test]
fn two_ports_on_one_function() {
    let host = read(&hosts::mt25208());
    let found = ports(&host);
    assert_eq!(found.iter().map(|p| p.3.as_deref()).collect::<Vec<_>>(), [Some("ib0"), Some("ib1")]);
    let second = &host.devices[0].ports[1];
    assert_eq!((second.state, second.phys_state, second.sm_lid), (PortState::Down, PhysState::Polling, Some(0)));
    assert_eq!(host.interface("ib0").unwrap().addresses.len(), 1);
}

#[test]
fn interfaces_of_planes_are_those_that_the_gids_name() {
    let host = read(&hosts::planes());
    let named: Vec<(u32, Option<String>)> =
        ports(&host).into_iter().filter(|port| port.3.is_some()).map(|port| (port.1, port.3)).collect();
    let wanted = [(3, "eth_p0"), (6, "eth_p1"), (9, "eth_p2"), (12, "eth_p3")];
    assert_eq!(named, wanted.map(|(port, net)| (port, Some(net.to_owned()))));
    assert_eq!(host.interface("eth_p1").unwrap().rdma, Some(("mlx5_0".to_owned(), 6)));
    assert_eq!(host.devices[0].count_planes(), 4);
    assert_eq!(read(&hosts::mt25208()).devices[0].count_planes(), 1);
}

#[test]
fn management_devices_are_no_rdma_devices() {
    let of_smi = ManagementDevice { device: "smi0".into(), parent: "mlx5_0".into() };
    let mut made = hosts::xdr();
    let host = read(&made);
    assert_eq!(host.management, std::slice::from_ref(&of_smi));
    assert_eq!(host.devices.iter().map(|d| d.name.as_str()).collect::<Vec<_>>(), ["mlx5_0"]);
    // Where ib_uverbs is not loaded, only netlink can say it.
    made.remove("sys/class/infiniband_verbs");
    assert!(read(&made).management.is_empty());
    made.put("netlink.json", r#"{"management":[{"device":"smi0","parent":"mlx5_0"}]}"#);
    assert_eq!(read(&made).management, [of_smi]);
}

#[test]
fn devices_without_pci_or_link_layer() {
    let rxe = read(&hosts::soft_roce());
    assert_eq!(ports(&rxe), [("rxe0".to_owned(), 1, LinkLayer::Ethernet, Some("eth9".to_owned()))]);
    assert!(rxe.devices[0].pci.is_none() && rxe.devices[0].firmware.is_none());
    let efa = read(&hosts::efa());
    assert_eq!(efa.devices[0].ports[0].link_layer, LinkLayer::Unknown);
    assert_eq!(efa.devices[0].pci.as_ref().unwrap().width, None, "0 and 255 lanes are no width");
    assert!(read(&hosts::plain()).devices.is_empty());
}

#[test]
fn a_folder_an_archive_and_memory_read_the_same() {
    for (name, made) in hosts::all() {
        let host = read(&made);
        let dir = tempfile::tempdir().unwrap();
        made.write_to(dir.path());
        assert_eq!(HostFacts::read_from(&HostTree::from_folder(dir.path())), host, "{name}");
        let tree = HostTree::from_folder(dir.path()).with_recording();
        let collected = spurline_fabric::collect_facts(&tree, |tree| drop(HostFacts::read_from(tree)));
        let mut packed = Vec::new();
        spurline_fabric::archive::write_archive(&collected, &mut packed).unwrap();
        let unpacked = spurline_fabric::archive::read_archive(packed.as_slice()).unwrap();
        assert_eq!(HostFacts::read_from(&HostTree::from_memory(unpacked)), host, "{name}");
    }
}

/// `cargo run -p spurline-fabric --example host -- samples docs/samples` makes them.
#[test]
fn the_samples_in_the_documents_are_those_of_made_up_hosts() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/samples");
    let samples = hosts::samples();
    for (name, made) in &samples {
        let file = std::fs::File::open(dir.join(name)).unwrap();
        assert!(
            spurline_fabric::archive::read_archive(file).unwrap() == made.entries(TreeEntry::File, TreeEntry::Link),
            "{name}"
        );
    }
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), samples.len());
}

/// One thing that can be wrong with a file.
fn spoil(entries: &mut BTreeMap<String, TreeEntry>, at: usize, how: u8, junk: &[u8]) {
    let Some(path) = entries.keys().nth(at % entries.len().max(1)).cloned() else { return };
    let entry = match how {
        0 => {
            entries.remove(&path);
            return;
        }
        1 => TreeEntry::File(Vec::new()),
        2 => TreeEntry::File(junk.to_vec()),
        3 => TreeEntry::Link(path.clone()),
        4 => TreeEntry::Link(String::from_utf8_lossy(junk).into_owned()),
        5 => TreeEntry::File(b"99999999999999999999999999".to_vec()),
        6 => TreeEntry::File(vec![b'7'; 3 << 20]),
        _ => TreeEntry::File(b"-1".to_vec()),
    };
    entries.insert(path, entry);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn half_broken_trees_are_no_panic(
        host in 0usize..20,
        spoils in proptest::collection::vec((any::<u32>(), 0u8..8, proptest::collection::vec(any::<u8>(), 0..40)), 1..40),
    ) {
        let all = hosts::all();
        let mut entries = all[host % all.len()].1.entries(TreeEntry::File, TreeEntry::Link);
        for (at, how, junk) in spoils {
            spoil(&mut entries, at as usize, how, &junk);
        }
        let host = HostFacts::read_from(&HostTree::from_memory(entries));
        serde_json::to_string(&host).unwrap();
        for interface in &host.interfaces {
            let _ = host.ports_of(interface);
        }
    }
}
