//! Findings about a configuration on a node: the matches of every entry, and the misses with the reason.

use crate::config::{
    ConfigReading, DeviceSelectors, MAX_RESOURCE_NAME, PluginConfig, ResourceConfig, SelectorKey, read_config,
};
use crate::hca::{Hca, HcaLink, NodeHcas};
use crate::select::{first_miss, select_hcas, values_of};
use crate::slots::SlotTable;
use spurline_config::values::nearest_word;
use spurline_fabric::finding::id;
use spurline_fabric::{HostFinding, Severity};
use std::collections::{BTreeMap, BTreeSet};

/// All findings about a configuration's text, and about the entries on a node, errors first.
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
        EntryLint { config, resource, subject: &subject, node, selected: &selected, findings: &mut findings }.examine();
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

/// An entry on a node.
struct EntryLint<'a> {
    config: &'a PluginConfig,
    resource: &'a ResourceConfig,
    subject: &'a str,
    node: &'a NodeHcas,
    selected: &'a [&'a Hca],
    findings: &'a mut Vec<HostFinding>,
}

impl EntryLint<'_> {
    fn add(&mut self, id: &'static str, severity: Severity, evidence: String, remedy: impl Into<String>) {
        self.findings.push(HostFinding::new(id, severity, self.subject, evidence, remedy));
    }

    fn examine(mut self) {
        self.check_device_names();
        if self.selected.is_empty() {
            let (evidence, remedy) = explain_miss(self.resource, self.node);
            self.add(id::K8S_NO_MATCH, Severity::Warning, evidence, remedy);
            return;
        }
        let words = self.selected.iter().map(|h| h.describe()).collect::<Vec<_>>().join(", ");
        let evidence = format!("on {} it matches {words}", self.node.label());
        self.add(id::K8S_MATCH, Severity::Info, evidence, "none needed");
        self.check_interfaces();
        self.check_reference();
        self.check_kinds();
        self.check_health();
        self.check_one_hca();
        self.check_slots();
    }

    /// Names of RDMA devices among those of interfaces. Only a node tells the two kinds of names apart: drivers and
    /// administrators also name interfaces like devices.
    fn check_device_names(&mut self) {
        for value in self.resource.selectors.values(SelectorKey::IfNames) {
            let device = self.node.hcas.iter().find(|hca| hca.name == *value);
            let Some(hca) = device.filter(|_| !self.node.interfaces.contains(value)) else { continue };
            let remedy = match hca.interfaces.first() {
                Some(interface) => format!("name its interface: \"{interface}\""),
                None => "it has no interface: select it by deviceIDs".to_owned(),
            };
            let evidence = format!("ifNames: {value} is an RDMA device of {} and no interface", self.node.label());
            self.add(id::K8S_SELECTOR, Severity::Warning, evidence, remedy);
        }
    }

    fn check_interfaces(&mut self) {
        for value in self.resource.selectors.values(SelectorKey::IfNames) {
            let is_device = self.node.hcas.iter().any(|hca| hca.name == *value);
            if !is_device && !self.selected.iter().any(|hca| hca.interfaces.contains(value)) {
                let (severity, why) = if self.node.interfaces.contains(value) {
                    (Severity::Warning, "has no RDMA device, or another selector excludes it")
                } else {
                    (Severity::Info, "does not exist on this node")
                };
                let remedy = match other_case(value, self.node) {
                    Some(name) => format!("names are compared with their case: write \"{name}\""),
                    None => "correct the name, or remove it".to_owned(),
                };
                self.add(id::K8S_NO_MATCH, severity, format!("ifNames: {value} {why}"), remedy);
            }
            let through: Vec<&Hca> = self.selected.iter().copied().filter(|h| h.bonds.contains(value)).collect();
            if through.is_empty() {
                continue;
            }
            let evidence = format!(
                "ifNames: {value} is a bond and resolves to {}; the reference compares interfaces of PCI functions only \
                 and finds nothing",
                join_names(&through)
            );
            let members: Vec<String> = through
                .iter()
                .filter_map(|hca| hca.interfaces.iter().find(|i| !hca.bonds.contains(i)).cloned())
                .collect();
            let members = members.join(", ");
            let remedy = if through.len() == 1 {
                format!("for use with both, name the member {members}")
            } else {
                format!("for use with both, name the members {members}")
            };
            self.add(id::K8S_SELECTOR, Severity::Info, evidence, remedy);
        }
    }

    /// Where the reference selects less.
    fn check_reference(&mut self) {
        let bare: Vec<&Hca> = self.selected.iter().copied().filter(|hca| hca.interfaces.is_empty()).collect();
        if !bare.is_empty() && !self.resource.selectors.values(SelectorKey::LinkTypes).is_empty() {
            let evidence = format!(
                "linkTypes: {} without an interface; the reference takes the link type of the interface and selects none",
                join_names(&bare)
            );
            self.add(id::K8S_SELECTOR, Severity::Info, evidence, "for use with both, load ib_ipoib");
        }
    }

    /// HCAs that are not alike.
    fn check_kinds(&mut self) {
        let wanted = self.resource.selectors.values(SelectorKey::LinkTypes);
        let mixed: Vec<&Hca> = self.selected.iter().copied().filter(|hca| hca.link == HcaLink::Mixed).collect();
        let is_alone = self.selected.len() == 1;
        for hca in &mixed {
            let evidence = format!(
                "{} is one HCA with both link layers: {}; a pod gets the whole HCA, and linkTypes can't select one port",
                hca.name,
                hca.describe_ports()
            );
            let uses_link_types = wanted.len() == 1;
            let others: Vec<String> = self
                .selected
                .iter()
                .filter(|other| other.link != HcaLink::Mixed)
                .filter_map(|other| other.interfaces.first().cloned())
                .collect();
            let remedy = if uses_link_types && !others.is_empty() {
                format!("for {} only, select by ifNames {others:?}", wanted[0])
            } else if is_alone {
                "none where pods are meant to have both; else give both ports one link layer (LINK_TYPE_P1 and LINK_TYPE_P2 of \
                 mlxconfig)"
                    .to_owned()
            } else {
                "give both ports one link layer (LINK_TYPE_P1 and LINK_TYPE_P2 of mlxconfig), or make a resource of this HCA \
                 alone"
                    .to_owned()
            };
            let severity = if is_alone { Severity::Info } else { Severity::Warning };
            self.add(id::K8S_MIXED_HCAS, severity, evidence, remedy);
        }
        let links: BTreeSet<HcaLink> = self.selected.iter().map(|h| h.link).filter(|l| *l != HcaLink::Mixed).collect();
        if links.len() > 1 {
            let names: Vec<&str> = links.iter().map(|l| l.as_str()).collect();
            let evidence =
                format!("it mixes {}: two pods can get HCAs that do not reach each other", names.join(" and "));
            self.add(
                id::K8S_MIXED_HCAS,
                Severity::Warning,
                evidence,
                "make an entry for each, with linkTypes or vendors",
            );
        } else {
            let rates: BTreeSet<u64> = self.selected.iter().filter_map(|h| h.rate_gbps.map(|r| r as u64)).collect();
            if rates.len() > 1 {
                let rates: Vec<String> = rates.iter().map(|r| format!("{r} Gb/s")).collect();
                let evidence =
                    format!("it mixes HCAs of {}: a pod's speed depends on which one it gets", rates.join(" and "));
                let remedy = "make an entry for each, with deviceIDs or ifNames";
                self.add(id::K8S_MIXED_HCAS, Severity::Warning, evidence, remedy);
            }
        }
        let kinds: BTreeSet<bool> = self.selected.iter().map(|h| h.is_virtual).collect();
        if kinds.len() > 1 {
            let evidence = "it mixes physical and virtual functions".to_owned();
            let remedy = "select by deviceIDs: virtual functions have their own";
            self.add(id::K8S_MIXED_HCAS, Severity::Warning, evidence, remedy);
        }
    }

    /// HCAs that pods can't use now.
    fn check_health(&mut self) {
        for hca in self.selected {
            if let Some(why) = hca.obstacle() {
                let remedy = "its slots are unhealthy until that changes; `spurline net doctor` finds the cause";
                self.add(id::K8S_HCA_UNUSABLE, Severity::Warning, format!("{}: {why}", hca.name), remedy);
            } else if let Some(why) = hca.missing_file() {
                let remedy = "containers that get it do not start: udevadm trigger --subsystem-match=infiniband_verbs";
                self.add(id::K8S_HCA_UNUSABLE, Severity::Warning, format!("{}: {why}", hca.name), remedy);
            }
            if let Some(bond) = hca.standby_of.as_ref().filter(|_| hca.needs_interface()) {
                let evidence = format!(
                    "{} is the standby of the bond {bond}: it has no GID of the bond's addresses until the bond fails over",
                    hca.name
                );
                let remedy =
                    "pods request all HCAs of the bond; or take the bond apart and give each card a subnet of its own";
                self.add(id::K8S_HCA_UNUSABLE, Severity::Warning, evidence, remedy);
            }
            let extra = self.resource.extra;
            if (extra.umad && hca.umad.is_empty()) || (extra.issm && hca.issm.is_empty()) {
                let evidence = format!("{} has no umad or issm device node, which extraDevices names", hca.name);
                self.add(id::K8S_HCA_UNUSABLE, Severity::Warning, evidence, "modprobe ib_umad");
            }
        }
    }

    /// Several HCAs, of which a pod with a single slot gets any.
    fn check_one_hca(&mut self) {
        let count = self.selected.len();
        if count < 2 || self.resource.slots == 0 {
            return;
        }
        let all = format!("{}: {count}", self.resource.resource());
        let what = format!("a pod that requests 1 gets one HCA of {count}; the reference gives every pod all of them");
        let bound: Vec<&Hca> = self.selected.iter().copied().filter(|h| h.needs_interface()).collect();
        if bound.is_empty() {
            self.add(id::K8S_ONE_HCA, Severity::Info, what, format!("pods that use all rails request {all}"));
            return;
        }
        let evidence = format!(
            "{what}. On Ethernet ({}) a pod with fewer slots than HCAs may get one that it has no interface on, and all GIDs \
             are zero there",
            join_names(&bound)
        );
        let split = entries_per_hca(self.config, self.resource, self.selected);
        let remedy = format!("pods request {all} and have an attachment for each{split}");
        self.add(id::K8S_ONE_HCA, Severity::Warning, evidence, remedy);
    }

    fn check_slots(&mut self) {
        let slots = self.resource.slots;
        let count = self.selected.len();
        let names: Vec<&str> = self.selected.iter().map(|h| h.name.as_str()).collect();
        let table = SlotTable::divide(&names, slots);
        if table.reduced_from.is_some() {
            let evidence = format!(
                "rdmaHcaMax is {slots}; {} slots fit a message of kubelet's API, so that many are advertised",
                table.slots.len()
            );
            let remedy = "lower rdmaHcaMax: a node runs some hundred pods at most";
            self.add(id::K8S_SLOTS, Severity::Warning, evidence, remedy);
        } else if 0 < slots && (slots as usize) < count {
            let evidence = format!("rdmaHcaMax is {slots} for {count} HCAs: some get no slot");
            self.add(id::K8S_SLOTS, Severity::Warning, evidence, format!("raise rdmaHcaMax to at least {count}"));
        }
    }
}

/// `mlx5_0, mlx5_1`.
fn join_names(hcas: &[&Hca]) -> String {
    hcas.iter().map(|hca| hca.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// The part of a remedy that gives each HCA a separate resource: `; or make an entry for each: NAME with ifNames ["IF"], …`. The
/// entries are valid beside the others of the configuration; empty where interfaces can't tell the HCAs apart.
pub fn entries_per_hca(config: &PluginConfig, resource: &ResourceConfig, hcas: &[&Hca]) -> String {
    let mut taken: Vec<String> =
        config.resources.iter().map(|r| r.name.clone()).filter(|name| *name != resource.name).collect();
    let mut entries = Vec::new();
    for hca in hcas {
        let is_shared =
            |name: &String| hcas.iter().any(|other| other.name != hca.name && other.interfaces.contains(name));
        // A bond over several HCAs names all HCAs, and a member a single HCA.
        let Some(interface) = hca.interfaces.iter().find(|name| !is_shared(name) && !hca.bonds.contains(name)) else {
            return String::new();
        };
        let label = hca.bonds.iter().find(|bond| !is_shared(bond)).unwrap_or(interface);
        let name = free_name(&resource.name, label, &taken);
        entries.push(format!("{name} with ifNames [\"{interface}\"]"));
        taken.push(name);
    }
    format!("; or make an entry for each: {}", entries.join(", "))
}

/// A valid resource name of both words that is not taken.
fn free_name(resource: &str, label: &str, taken: &[String]) -> String {
    let word: String = label.chars().filter(char::is_ascii_alphanumeric).collect();
    let mut name = format!("{resource}_{word}");
    let mut number = 1;
    loop {
        if name.len() > MAX_RESOURCE_NAME {
            // The end names the rail.
            name = name.split_off(name.len() - MAX_RESOURCE_NAME).trim_start_matches('_').to_owned();
        }
        if !taken.contains(&name) {
            return name;
        }
        number += 1;
        name = format!("{resource}_{word}_{number}");
    }
}

/// The interface of the node whose name differs in case only.
fn other_case<'a>(name: &str, node: &'a NodeHcas) -> Option<&'a str> {
    let mut others = node.interfaces.iter().map(String::as_str);
    others.find(|other| *other != name && other.eq_ignore_ascii_case(name))
}

/// Why an entry matches nothing: the HCA that passes the most selectors, and the selector that excludes that HCA.
fn explain_miss(resource: &ResourceConfig, node: &NodeHcas) -> (String, String) {
    let selectors = &resource.selectors;
    let nearest = node.hcas.iter().min_by_key(|hca| std::cmp::Reverse(selector_hits(hca, selectors)));
    let nearest = nearest.filter(|_| !selectors.is_empty());
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
        if let Some(hca) = node.hcas.iter().find(|hca| hca.name == *name && !node.interfaces.contains(name)) {
            let own = hca.interfaces.first().map_or("none", String::as_str);
            return format!("{name} is an RDMA device; its interface is {own}");
        }
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

/// The number of selectors that an HCA passes.
fn selector_hits(hca: &Hca, selectors: &DeviceSelectors) -> usize {
    let keys = SelectorKey::ALL.iter().filter(|key| {
        let wanted = selectors.values(**key);
        !wanted.is_empty() && values_of(hca, **key).iter().any(|v| wanted.contains(v))
    });
    keys.count()
}
