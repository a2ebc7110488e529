//! Proposes a configuration for a node or many: resource groups as an administrator would make them, the selectors that select
//! exactly these HCAs, and the reasons. Writes nothing.

use crate::config::{DeviceSelectors, SelectorKey};
use crate::hca::{Hca, HcaLink, NodeHcas};
use crate::select::{select_hcas, values_of};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Slots for each HCA of a resource, where none are given: more than the pods with RDMA that a node runs.
pub const DEFAULT_SLOTS: u32 = 64;

/// The proposal for some nodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiscoveryReport {
    /// The file for the plugin.
    pub config: Value,
    /// A resource each, with reasons.
    pub groups: Vec<ResourceGroup>,
    /// HCAs without a resource.
    pub left_out: Vec<LeftOutHca>,
    /// The nodes.
    pub nodes: Vec<String>,
    /// Notes for the time before the application.
    pub notes: Vec<String>,
}

/// HCAs that serve the same purpose.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ResourceGroup {
    /// The name that pods request.
    pub resource: String,
    /// HCAs by node.
    pub hcas: BTreeMap<String, Vec<String>>,
    /// Why these form a resource, and why these selectors are right.
    pub why: String,
    /// NUMA nodes of the HCAs.
    pub numa_nodes: BTreeSet<u32>,
}

/// An HCA without a resource.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LeftOutHca {
    /// The node.
    pub node: String,
    /// The name.
    pub hca: String,
    /// Why.
    pub why: String,
}

/// What makes HCAs different resources; the order is that of the file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct GroupKey {
    link: HcaLink,
    is_bond: bool,
    is_virtual: bool,
    /// 0 while no HCA of the kind has an active port.
    rate: u64,
    ids: (Option<String>, Option<String>),
}

impl GroupKey {
    fn of(hca: &Hca) -> Self {
        GroupKey {
            link: hca.link,
            is_bond: !hca.bonds.is_empty(),
            is_virtual: hca.is_virtual,
            rate: hca.rate_gbps.map_or(0, |r| r as u64),
            ids: (hca.vendor.clone(), hca.device_id.clone()),
        }
    }

    /// The key with a rate, for an HCA without an active port: that of the fastest HCA that is the same otherwise.
    fn with_rate_of(mut self, hcas: impl Iterator<Item = GroupKey>) -> Self {
        if self.rate == 0 {
            let fastest =
                hcas.filter(|other| GroupKey { rate: 0, ..other.clone() } == self).map(|other| other.rate).max();
            self.rate = fastest.unwrap_or(0);
        }
        self
    }

    fn base_name(&self) -> String {
        let link = match self.link {
            HcaLink::InfiniBand => "ib",
            HcaLink::OmniPath => "opa",
            HcaLink::Roce => "roce",
            HcaLink::Iwarp => "iwarp",
            HcaLink::Mixed => "vpi",
            HcaLink::Other => "rdma",
        };
        let bond = if self.is_bond { "_bond" } else { "" };
        let function = if self.is_virtual { "_vf" } else { "" };
        format!("{link}{bond}{function}")
    }

    fn reason(&self) -> String {
        let what = match (self.link, self.is_bond) {
            (HcaLink::InfiniBand, _) => "InfiniBand rails, apart from Ethernet: the two do not reach each other",
            (HcaLink::OmniPath, _) => "Omni-Path rails, which do not reach InfiniBand",
            (HcaLink::Roce, true) => "RoCE over bonds, which usually carry storage, apart from rails without a bond",
            (HcaLink::Roce, false) => "RoCE rails without a bond",
            (HcaLink::Iwarp, _) => "iWARP, which connects to iWARP only",
            (HcaLink::Mixed, _) => "HCAs with ports on both kinds of network",
            (HcaLink::Other, _) => "RDMA devices of another kind",
        };
        let virtual_function = if self.is_virtual { "; virtual functions, apart from physical ones" } else { "" };
        format!("{what}{virtual_function}")
    }
}

/// Proposes a configuration for `nodes`, with `slots` for each HCA.
pub fn discover(nodes: &[NodeHcas], slots: u32) -> DiscoveryReport {
    let mut left_out = Vec::new();
    let mut by_key: BTreeMap<GroupKey, Vec<(usize, &Hca)>> = BTreeMap::new();
    for (index, node) in nodes.iter().enumerate() {
        for hca in &node.hcas {
            match left_out_reason(hca) {
                Some(why) => {
                    left_out.push(LeftOutHca { node: node.label().to_owned(), hca: hca.name.clone(), why });
                }
                None => {
                    let all = nodes.iter().flat_map(|node| &node.hcas).map(GroupKey::of);
                    by_key.entry(GroupKey::of(hca).with_rate_of(all)).or_default().push((index, hca));
                }
            }
        }
    }
    for node in nodes {
        left_out.extend(node.management.iter().map(|management| LeftOutHca {
            node: node.label().to_owned(),
            hca: management.device.clone(),
            why: format!(
                "it is the management device (SMI) of {}: it has no verbs and carries no data",
                management.parent
            ),
        }));
    }
    let names = unique_names(by_key.keys());
    let mut entries = Vec::new();
    let mut groups = Vec::new();
    let mut notes = Vec::new();
    for (key, members) in &by_key {
        let name = &names[key];
        let (selectors, exact) = exact_selectors(nodes, members);
        let most = (0..nodes.len()).map(|n| members.iter().filter(|(i, _)| *i == n).count()).max().unwrap_or(0);
        let mut listed = serde_json::Map::new();
        for selector in SelectorKey::ALL {
            let values = selectors.values(selector);
            if !values.is_empty() {
                listed.insert(selector.as_str().to_owned(), json!(values));
            }
        }
        let total = slots.saturating_mul(u32::try_from(most).unwrap_or(u32::MAX));
        entries.push(json!({"resourceName": name, "rdmaHcaMax": total, "selectors": listed}));
        let used: Vec<&str> = listed.keys().map(String::as_str).collect();
        let mut hcas: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (node, hca) in members {
            hcas.entry(nodes[*node].label().to_owned()).or_default().push(hca.name.clone());
        }
        let how = if exact {
            format!("{} select exactly these on every node", used.join(", "))
        } else {
            format!("no selectors select exactly these; {} also select others", used.join(", "))
        };
        let needs_interface = members.iter().any(|(_, hca)| hca.needs_interface());
        let chance = if needs_interface && most > 1 {
            "; a pod that requests fewer than all may get one that it has no interface on: give pods the interfaces of \
                 all, or make an entry for each HCA with ifNames"
        } else {
            ""
        };
        groups.push(ResourceGroup {
            resource: format!("rdma/{name}"),
            hcas,
            why: format!(
                "{}; {how}; rdmaHcaMax is {slots} for each of the {most} HCAs of a node{chance}",
                key.reason()
            ),
            numa_nodes: members.iter().filter_map(|(_, h)| h.numa_node).collect(),
        });
        if most > 1 {
            notes.push(format!(
                "a pod gets one HCA for each rdma/{name} that it requests; for all rails of a node it requests {most}"
            ));
        }
        if members.iter().any(|(_, hca)| hca.needs_interface()) {
            notes.push(format!(
                "rdma/{name} works only in pods with an interface of that network: `spurline k8s advise` says which"
            ));
        }
        for (node, hca) in members.iter().filter(|(_, h)| !h.has_active_port()) {
            notes.push(format!("{} on {} has no active port; its slots are unhealthy", hca.name, nodes[*node].label()));
        }
    }
    for node in nodes {
        notes.extend(node.hcas.iter().filter_map(|hca| standby_note(node, hca)));
    }
    for node in nodes.iter().filter(|n| n.rdma_exclusive == Some(true)) {
        notes.push(format!("{}: RDMA devices are exclusive: rdma system set netns shared", node.label()));
    }
    DiscoveryReport {
        config: json!({"periodicUpdateInterval": 60, "configList": entries}),
        groups,
        left_out,
        nodes: nodes.iter().map(|n| n.label().to_owned()).collect(),
        notes,
    }
}

/// The note about a standby of an active-backup bond, whose addresses are on another HCA.
pub(crate) fn standby_note(node: &NodeHcas, hca: &Hca) -> Option<String> {
    let bond = hca.standby_of.as_ref().filter(|_| hca.needs_interface())?;
    Some(format!(
        "{} on {} is the standby of the bond {bond}: it has none of the bond's addresses until the bond fails over, so pods request \
         all HCAs of the bond",
        hca.name,
        node.label()
    ))
}

fn left_out_reason(hca: &Hca) -> Option<String> {
    if let Some(why) = hca.missing_file() {
        return Some(format!("{why}: udevadm trigger --subsystem-match=infiniband_verbs"));
    }
    if hca.uverbs.is_none() {
        return Some("it has no device node (uverbs): load ib_uverbs".to_owned());
    }
    if hca.vendor.is_none() && hca.interfaces.is_empty() {
        return Some("it has neither PCI ids nor an interface, so no selector can name it".to_owned());
    }
    None
}

/// A name for each group: the base name where unique, else with the rate, else with the device id.
fn unique_names<'a>(keys: impl Iterator<Item = &'a GroupKey>) -> BTreeMap<&'a GroupKey, String> {
    let keys: Vec<&GroupKey> = keys.collect();
    keys.iter().map(|key| (*key, name_among(&keys, key))).collect()
}

fn name_among(keys: &[&GroupKey], key: &GroupKey) -> String {
    let twins: Vec<&&GroupKey> = keys.iter().filter(|k| k.base_name() == key.base_name()).collect();
    if twins.len() == 1 {
        return key.base_name();
    }
    let id = key.ids.1.as_deref().unwrap_or("soft");
    match twins.iter().filter(|k| name_with_rate(k) == name_with_rate(key)).count() {
        1 => name_with_rate(key),
        _ => format!("{}_{id}", name_with_rate(key)),
    }
}

fn name_with_rate(k: &GroupKey) -> String {
    format!("{}_{}g", k.base_name(), k.rate)
}

/// The shortest selectors that select exactly `members` on every node, and whether there are such.
fn exact_selectors(nodes: &[NodeHcas], members: &[(usize, &Hca)]) -> (DeviceSelectors, bool) {
    let union = |key: SelectorKey| -> Vec<String> {
        let all = members.iter().flat_map(|(_, hca)| match key {
            // The first name is the function's own, which the reference compares as well.
            SelectorKey::IfNames => hca.interfaces.first().cloned().into_iter().collect(),
            _ => values_of(hca, key),
        });
        all.collect::<BTreeSet<_>>().into_iter().collect()
    };
    let is_exact = |selectors: &DeviceSelectors| {
        nodes.iter().enumerate().all(|(index, node)| {
            let wanted: Vec<&str> = members.iter().filter(|(i, _)| *i == index).map(|(_, h)| h.name.as_str()).collect();
            let got: Vec<&str> = select_hcas(node, selectors).iter().map(|h| h.name.as_str()).collect();
            wanted == got
        })
    };
    use SelectorKey::{DeviceIds, IfNames, LinkTypes, Vendors};
    let candidates: [&[SelectorKey]; 5] = [
        &[Vendors, LinkTypes],
        &[Vendors, DeviceIds, LinkTypes],
        &[Vendors, DeviceIds],
        &[Vendors, LinkTypes, IfNames],
        &[IfNames],
    ];
    let mut last = DeviceSelectors::default();
    for keys in candidates {
        // A selector without a value of some member would exclude that member.
        if keys.iter().any(|k| members.iter().any(|(_, h)| values_of(h, *k).is_empty())) {
            continue;
        }
        let selectors = keys.iter().fold(DeviceSelectors::default(), |s, k| s.with_values(*k, union(*k)));
        if is_exact(&selectors) {
            return (selectors, true);
        }
        last = selectors;
    }
    (last, false)
}
