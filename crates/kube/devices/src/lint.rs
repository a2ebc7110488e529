//! Findings about a configuration on a node: what every entry matches, what it misses and why.

use crate::config::{ConfigReading, PluginConfig, ResourceConfig, SelectorKey, read_config};
use crate::hca::{Hca, HcaLink, NodeHcas};
use crate::select::{first_miss, select_hcas, values_of};
use crate::slots::SlotTable;
use spurline_config::values::nearest_word;
use spurline_fabric::finding::id;
use spurline_fabric::{HostFinding, Severity};
use std::collections::{BTreeMap, BTreeSet};

/// All findings about a configuration's text, and about its entries on a node, errors first.
pub fn lint_config(text: &str, file: &str, node: &NodeHcas) -> Vec<HostFinding> {
    let ConfigReading { config, mut findings } = read_config(text, file);
    if let Some(config) = config {
        findings.extend(lint_node(&config, node));
    }
    findings.sort_by_key(|f| f.severity);
    findings
}

/// Findings about a valid configuration on a node.
pub fn lint_node(config: &PluginConfig, node: &NodeHcas) -> Vec<HostFinding> {
    let mut findings = Vec::new();
    if node.rdma_exclusive == Some(true) {
        findings.push(HostFinding::new(
            id::RDMA_NAMESPACE,
            Severity::Error,
            node.label(),
            "each RDMA device belongs to one network namespace (rdma system: netns exclusive), so a pod cannot use a \
             device node that it is given",
            "rdma system set netns shared; or use SR-IOV with the RDMA CNI instead of this plugin",
        ));
    }
    if node.hcas.is_empty() {
        findings.push(HostFinding::new(
            id::K8S_NO_MATCH,
            Severity::Info,
            node.label(),
            "it has no RDMA device: the plugin runs idle there and advertises 0 of each resource",
            "expected on nodes without RDMA; else load the driver (`spurline net doctor`)",
        ));
        return findings;
    }
    if !node.rdma_cm {
        findings.push(HostFinding::new(
            id::K8S_HCA_UNUSABLE,
            Severity::Warning,
            node.label(),
            "/dev/infiniband/rdma_cm does not exist: pods get no connection manager",
            "modprobe rdma_ucm",
        ));
    }
    let mut claims: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (index, resource) in config.resources.iter().enumerate() {
        let subject = format!("configList[{index}] ({})", resource.resource());
        let selected = select_hcas(node, &resource.selectors);
        for hca in &selected {
            claims.entry(&hca.name).or_default().push(resource.resource());
        }
        lint_entry(resource, &subject, node, &selected, &mut findings);
    }
    for (hca, resources) in &claims {
        if resources.len() > 1 {
            findings.push(HostFinding::new(
                id::K8S_HCA_SHARED,
                Severity::Warning,
                format!("{hca} on {}", node.label()),
                format!("{} claim it: pods of both share it, and each counts its slots alone", resources.join(" and ")),
                "make the selectors disjoint, unless this is intended",
            ));
        }
    }
    if claims.is_empty() {
        findings.push(HostFinding::new(
            id::K8S_NO_MATCH,
            Severity::Error,
            node.label(),
            format!("no entry matches any of its HCAs: {}", describe_all(&node.hcas)),
            "`spurline k8s discover` prints a configuration for this node",
        ));
    }
    for hca in node.hcas.iter().filter(|hca| !claims.is_empty() && !claims.contains_key(hca.name.as_str())) {
        findings.push(HostFinding::new(
            id::K8S_HCA_UNCLAIMED,
            Severity::Info,
            format!("{} on {}", hca.name, node.label()),
            format!("no entry selects {}", hca.describe()),
            "add an entry if pods are meant to use it",
        ));
    }
    findings
}

fn lint_entry(
    resource: &ResourceConfig,
    subject: &str,
    node: &NodeHcas,
    selected: &[&Hca],
    findings: &mut Vec<HostFinding>,
) {
    let mut add = |id, severity, evidence: String, remedy: String| {
        findings.push(HostFinding::new(id, severity, subject, evidence, remedy));
    };
    if selected.is_empty() {
        let (evidence, remedy) = explain_miss(resource, node);
        add(id::K8S_NO_MATCH, Severity::Warning, evidence, remedy);
        return;
    }
    add(
        id::K8S_MATCH,
        Severity::Info,
        format!(
            "on {} it matches {}",
            node.label(),
            selected.iter().map(|h| h.describe()).collect::<Vec<_>>().join(", ")
        ),
        "none needed".to_owned(),
    );
    for value in resource.selectors.values(SelectorKey::IfNames) {
        if !selected.iter().any(|hca| hca.interfaces.contains(value)) {
            let (severity, why) = match node.interfaces.contains(value) {
                true => (Severity::Warning, "has no RDMA device, or another selector excludes it"),
                false => (Severity::Info, "does not exist on this node"),
            };
            let evidence = format!("ifNames: {value} {why}");
            let remedy = match other_case(value, node) {
                Some(name) => format!("names are compared with their case: write \"{name}\""),
                None => "correct the name, or remove it".to_owned(),
            };
            add(id::K8S_NO_MATCH, severity, evidence, remedy);
        }
        let through = selected.iter().find(|h| h.bonds.contains(value));
        if let Some(hca) = through {
            let evidence = format!(
                "ifNames: {value} is a bond and resolves to {}; the reference compares interfaces of PCI functions only \
                 and finds nothing",
                hca.name
            );
            let member = hca.interfaces.iter().find(|i| !hca.bonds.contains(i)).cloned().unwrap_or_default();
            add(id::K8S_SELECTOR, Severity::Info, evidence, format!("for use with both, name the member {member}"));
        }
    }
    let without: Vec<&str> =
        selected.iter().filter(|hca| hca.interfaces.is_empty()).map(|hca| hca.name.as_str()).collect();
    if !without.is_empty() && !resource.selectors.values(SelectorKey::LinkTypes).is_empty() {
        let evidence = format!(
            "linkTypes: {} without an interface; the reference takes the link type of the interface and selects none",
            without.join(", ")
        );
        add(id::K8S_SELECTOR, Severity::Info, evidence, "for use with both, load ib_ipoib".to_owned());
    }
    let links: BTreeSet<HcaLink> = selected.iter().map(|h| h.link).collect();
    if links.len() > 1 {
        let names: Vec<&str> = links.iter().map(|l| l.as_str()).collect();
        add(
            id::K8S_MIXED_HCAS,
            Severity::Warning,
            format!("it mixes {}: two pods can get HCAs that do not reach each other", names.join(" and ")),
            "make an entry for each, with linkTypes".to_owned(),
        );
    } else {
        let rates: BTreeSet<u64> = selected.iter().filter_map(|h| h.rate_gbps.map(|r| r as u64)).collect();
        if rates.len() > 1 {
            let rates: Vec<String> = rates.iter().map(|r| format!("{r} Gb/s")).collect();
            add(
                id::K8S_MIXED_HCAS,
                Severity::Warning,
                format!("it mixes HCAs of {}: a pod's speed depends on which one it gets", rates.join(" and ")),
                "make an entry for each, with deviceIDs or ifNames".to_owned(),
            );
        }
    }
    let kinds: BTreeSet<bool> = selected.iter().map(|h| h.is_virtual).collect();
    if kinds.len() > 1 {
        add(
            id::K8S_MIXED_HCAS,
            Severity::Warning,
            "it mixes physical and virtual functions".to_owned(),
            "select by deviceIDs: virtual functions have their own".to_owned(),
        );
    }
    for hca in selected {
        if let Some(why) = hca.obstacle() {
            let remedy = "its slots are unhealthy until that changes; `spurline net doctor` finds the cause".to_owned();
            add(id::K8S_HCA_UNUSABLE, Severity::Warning, format!("{}: {why}", hca.name), remedy);
        }
        if (resource.extra.umad && hca.umad.is_empty()) || (resource.extra.issm && hca.issm.is_empty()) {
            let evidence = format!("{} has no umad or issm device node, which extraDevices names", hca.name);
            add(id::K8S_HCA_UNUSABLE, Severity::Warning, evidence, "modprobe ib_umad".to_owned());
        }
    }
    if selected.len() > 1 && resource.slots > 0 {
        let all = format!("{}: {}", resource.resource(), selected.len());
        let what = format!(
            "a pod that requests 1 gets one HCA of {}; the reference gives every pod all of them",
            selected.len()
        );
        let bound: Vec<&str> = selected.iter().filter(|h| h.needs_interface()).map(|h| h.name.as_str()).collect();
        match bound.is_empty() {
            false => {
                let evidence = format!(
                    "{what}. On Ethernet ({}) a pod with fewer slots than HCAs may get one that it has no interface on, \
                     and all GIDs are zero there",
                    bound.join(", ")
                );
                let remedy = format!(
                    "pods request {all} and have an attachment for each; or {}",
                    entries_per_hca(resource, selected)
                );
                add(id::K8S_ONE_HCA, Severity::Warning, evidence, remedy);
            }
            true => add(id::K8S_ONE_HCA, Severity::Info, what, format!("pods that use all rails request {all}")),
        }
    }
    let names: Vec<&str> = selected.iter().map(|h| h.name.as_str()).collect();
    let table = SlotTable::divide(&names, resource.slots);
    if table.reduced_from.is_some() {
        add(
            id::K8S_SLOTS,
            Severity::Warning,
            format!(
                "rdmaHcaMax is {}; {} slots fit a message of kubelet's API, so that many are advertised",
                resource.slots,
                table.slots.len()
            ),
            "lower rdmaHcaMax: a node runs some hundred pods at most".to_owned(),
        );
    } else if 0 < resource.slots && (resource.slots as usize) < selected.len() {
        add(
            id::K8S_SLOTS,
            Severity::Warning,
            format!("rdmaHcaMax is {} for {} HCAs: some get no slot", resource.slots, selected.len()),
            format!("raise rdmaHcaMax to at least {}", selected.len()),
        );
    }
}

/// The remedy that gives each HCA a resource of its own.
pub fn entries_per_hca(resource: &ResourceConfig, hcas: &[&Hca]) -> String {
    let entry = |hca: &&Hca| {
        let interface = hca.interfaces.first().map_or("INTERFACE", String::as_str);
        let name = hca.bonds.first().map_or(interface, String::as_str);
        let word: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
        format!("{}_{word} with ifNames [\"{interface}\"]", resource.name)
    };
    format!("make an entry for each: {}", hcas.iter().map(entry).collect::<Vec<_>>().join(", "))
}

/// The interface of the node whose name differs in case only.
fn other_case<'a>(name: &str, node: &'a NodeHcas) -> Option<&'a str> {
    let mut others = node.interfaces.iter().map(String::as_str);
    others.find(|other| *other != name && other.eq_ignore_ascii_case(name))
}

/// Why an entry matches nothing: the HCA that passes the most selectors, and the selector that excludes it.
fn explain_miss(resource: &ResourceConfig, node: &NodeHcas) -> (String, String) {
    let selectors = &resource.selectors;
    let rank = |hca: &Hca| {
        let hits = |key: &SelectorKey| {
            let wanted = selectors.values(*key);
            !wanted.is_empty() && values_of(hca, *key).iter().any(|v| wanted.contains(v))
        };
        SelectorKey::ALL.iter().filter(|k| hits(k)).count()
    };
    let nearest = node.hcas.iter().min_by_key(|hca| std::cmp::Reverse(rank(hca))).filter(|_| !selectors.is_empty());
    let Some((hca, miss)) = nearest.and_then(|hca| Some((hca, first_miss(hca, selectors)?))) else {
        return ("it matches no HCA".to_owned(), "name one".to_owned());
    };
    let wanted = selectors.values(miss.key);
    let has = match miss.has.as_slice() {
        [] => "none".to_owned(),
        some => some.join(", "),
    };
    let evidence = format!(
        "on {} it matches no HCA; the nearest is {}, whose {} are {has}, not {}",
        node.label(),
        hca.name,
        miss.key.as_str(),
        wanted.join(", ")
    );
    let remedy = match miss.key {
        SelectorKey::IfNames => interface_remedy(wanted, node),
        _ if miss.has.is_empty() => format!("remove {} and select by ifNames", miss.key.as_str()),
        _ => format!("if this HCA is meant: \"{}\": [\"{}\"]", miss.key.as_str(), miss.has.join("\", \"")),
    };
    (evidence, remedy)
}

fn interface_remedy(wanted: &[String], node: &NodeHcas) -> String {
    let with_hca: Vec<&str> = node.hcas.iter().flat_map(|h| h.interfaces.iter().map(String::as_str)).collect();
    for name in wanted {
        if node.interfaces.contains(name) {
            return format!("{name} exists and has no RDMA device; those that have one: {}", with_hca.join(", "));
        }
        if let Some(other) = other_case(name, node) {
            return format!("names are compared with their case: write \"{other}\"");
        }
        if let Some(near) = nearest_word(name, with_hca.iter().copied()) {
            return format!("did you mean \"{near}\"? Interfaces with an RDMA device: {}", with_hca.join(", "));
        }
    }
    format!("interfaces with an RDMA device: {}", with_hca.join(", "))
}

fn describe_all(hcas: &[Hca]) -> String {
    hcas.iter().map(Hca::describe).collect::<Vec<_>>().join(", ")
}
