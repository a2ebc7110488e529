//! Whether RDMA works from inside a pod, before anything is measured: devices, ports, GIDs, locked memory. Opens nothing and
//! measures nothing.

use crate::hca::NodeHcas;
use serde::Serialize;
use spurline_fabric::{DevicePort, GidType, HostFacts, HostTree, LinkLayer, PortState, RdmaDevice};

/// How the limit of locked memory is raised for a container of any user.
pub const MEMLOCK_REMEDY: &str = "--use-cdi --cdi-memlock unlimited of the device plugin (devicePlugin.useCdi and \
                                  devicePlugin.memlock of `spurline k8s render`), the NRI plugin ulimit-adjuster, or \
                                  LimitMEMLOCK=infinity in containerd.service";

/// A row of the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VerifyRow {
    /// What was checked: `device`, `port`, `gid`, `memlock`, `bandwidth`, `latency`.
    pub check: &'static str,
    /// The HCA, port or rail.
    pub subject: String,
    /// Whether the check passed.
    pub pass: bool,
    /// What was seen.
    pub evidence: String,
    /// The remedy after a failure; else empty.
    pub remedy: String,
}

impl VerifyRow {
    /// A row that passed.
    pub fn passed(check: &'static str, subject: impl Into<String>, evidence: impl Into<String>) -> Self {
        VerifyRow { check, subject: subject.into(), pass: true, evidence: evidence.into(), remedy: String::new() }
    }

    /// A row that failed.
    pub fn failed(
        check: &'static str,
        subject: impl Into<String>,
        evidence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        VerifyRow { check, subject: subject.into(), pass: false, evidence: evidence.into(), remedy: remedy.into() }
    }
}

/// What a pod's checks need besides files.
pub struct PodLimits<'a> {
    /// The limit of locked memory in bytes; `None` without a limit, or when a capability lifts the limit.
    pub memlock: Option<u64>,
    /// The memory that has to be lockable.
    pub needed: u64,
    /// Opens a device node for reading and writing; the error's text where that fails.
    pub open_node: &'a dyn Fn(&str) -> Result<(), String>,
}

/// An end of a connection, to be shown.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RailIdentity {
    /// The HCA.
    pub hca: String,
    /// The node GUID.
    pub guid: Option<String>,
    /// The port.
    pub port: u32,
    /// The port's LID; 0 on Ethernet.
    pub lid: Option<u32>,
    /// The usable GID.
    pub gid: Option<String>,
}

/// The checks of a pod, on the HCAs that the pod can open; without any, on all visible HCAs.
pub fn verify_pod(facts: &HostFacts, node: &NodeHcas, limits: &PodLimits<'_>) -> Vec<VerifyRow> {
    let mut rows = Vec::new();
    if facts.devices.is_empty() {
        let evidence = "/sys/class/infiniband shows no device";
        let remedy =
            "the node has none, its driver is not loaded, or the RDMA subsystem is exclusive (rdma system show)";
        rows.push(VerifyRow::failed("device", "all", evidence, remedy));
        return rows;
    }
    let opened: Vec<(&RdmaDevice, Result<String, String>)> = facts
        .devices
        .iter()
        .map(|device| {
            let uverbs = node.hcas.iter().find(|h| h.name == device.name).and_then(|h| h.uverbs.clone());
            let Some(uverbs) = uverbs else { return (device, Err("the kernel has no uverbs node for it".to_owned())) };
            let path = format!("/dev/infiniband/{uverbs}");
            (device, (limits.open_node)(&path).map(|()| path.clone()).map_err(|why| format!("{path}: {why}")))
        })
        .collect();
    let usable: Vec<&RdmaDevice> = opened.iter().filter(|(_, o)| o.is_ok()).map(|(d, _)| *d).collect();
    for (device, result) in &opened {
        match result {
            Ok(path) => rows.push(VerifyRow::passed("device", &device.name, format!("{path} opens"))),
            // HCAs that were not requested are seen in sysfs as well.
            Err(_) if !usable.is_empty() => {}
            Err(why) => rows.push(VerifyRow::failed(
                "device",
                &device.name,
                why,
                "request it: resources: {limits: {rdma/NAME: 1}}; a hostPath does not suffice",
            )),
        }
    }
    let examined = if usable.is_empty() { facts.devices.iter().collect() } else { usable };
    for device in examined {
        for port in &device.ports {
            rows.extend(verify_port(facts, device, port));
        }
    }
    rows.push(verify_memlock(limits));
    rows
}

fn verify_port(facts: &HostFacts, device: &RdmaDevice, port: &DevicePort) -> Vec<VerifyRow> {
    let subject = format!("{}/{}", device.name, port.number);
    let rate = port.rate.as_ref().map_or("unknown rate".to_owned(), |r| r.describe());
    let state = format!("{} ({}), {rate}", port.state.as_str(), port.phys_state.as_str());
    let mut rows = Vec::new();
    if port.state != PortState::Active {
        let remedy = match port.link_layer {
            LinkLayer::InfiniBand => "check the cable and the subnet manager (`spurline net doctor` on the node)",
            _ => "set the interface up on the node, and check cable and switch port",
        };
        rows.push(VerifyRow::failed("port", &subject, state, remedy));
    } else {
        rows.push(VerifyRow::passed("port", &subject, state));
    }
    let identity = identify_rail(facts, device, port);
    let remedy = "give the pod an interface on this HCA: `spurline k8s advise` says which attachment";
    match (&identity.gid, port.link_layer) {
        (_, LinkLayer::InfiniBand) => {
            let lid = identity.lid.unwrap_or(0);
            if lid == 0 {
                let remedy =
                    "a subnet manager has to configure the port: `spurline net doctor` on the node says why it has not";
                rows.push(VerifyRow::failed("gid", &subject, "LID 0", remedy));
            } else {
                rows.push(VerifyRow::passed("gid", &subject, format!("LID {lid}")));
            }
        }
        (Some(gid), _) => rows.push(VerifyRow::passed("gid", &subject, gid.clone())),
        (None, _) if port.gids.is_empty() => {
            rows.push(VerifyRow::failed("gid", &subject, "all GIDs are zero in this network namespace", remedy));
        }
        (None, _) => {
            let evidence = "no GID belongs to an interface with an address in this network namespace";
            rows.push(VerifyRow::failed("gid", &subject, evidence, remedy));
        }
    }
    rows
}

/// The identity of a port, with the GID that a connection would use: of an interface that this network namespace has.
pub fn identify_rail(facts: &HostFacts, device: &RdmaDevice, port: &DevicePort) -> RailIdentity {
    let is_iwarp = device.node_type.as_deref() == Some("RNIC");
    let usable = port.gids.iter().filter(|gid| gid.netdev.as_ref().is_none_or(|name| facts.interface(name).is_some()));
    let gid = match port.link_layer {
        LinkLayer::InfiniBand => port.gids.first(),
        _ if is_iwarp => usable.clone().next(),
        // The default GID of an interface without an address is link-local.
        _ => usable.clone().find(|g| g.kind == GidType::RoceV2 && g.is_routable()),
    };
    RailIdentity {
        hca: device.name.clone(),
        guid: device.node_guid.clone(),
        port: port.number,
        lid: port.lid,
        gid: gid.map(|g| format!("{g} ({})", g.kind)),
    }
}

fn verify_memlock(limits: &PodLimits<'_>) -> VerifyRow {
    match limits.memlock {
        Some(limit) if limit < limits.needed => VerifyRow::failed(
            "memlock",
            "this process",
            format!("{} KiB can be locked, {} are needed", limit >> 10, mib_text(limits.needed)),
            format!(
                "as root: securityContext: {{capabilities: {{add: [IPC_LOCK]}}}}; as another user: {MEMLOCK_REMEDY}. The first \
                 of these sets the limit of the container's own program: run this there, not by `kubectl exec`"
            ),
        ),
        Some(limit) => VerifyRow::passed("memlock", "this process", format!("{} can be locked", mib_text(limit))),
        None => VerifyRow::passed("memlock", "this process", "unlimited"),
    }
}

fn mib_text(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// An end of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct VerifyEnd {
    /// The host name: the pod's, or that in the manifest.
    pub host: String,
    /// The node, where the pod's variable NODE_NAME has the name.
    pub node: Option<String>,
    /// The ports of the HCAs that were given to the pod.
    pub rails: Vec<RailIdentity>,
    /// The GUIDs of all HCAs of the node, which `/sys` shows in every pod.
    #[serde(skip)]
    pub node_guids: Vec<String>,
}

impl VerifyEnd {
    /// The end with these files.
    pub fn read_from(tree: &HostTree, node: Option<String>) -> Self {
        let facts = HostFacts::read_from(tree);
        let hcas = NodeHcas::read_from(tree);
        // In a pod these are the given device nodes.
        let names = tree.list_names("dev/infiniband");
        let devices = facts.devices.iter().filter(|device| {
            let uverbs = hcas.hcas.iter().find(|hca| hca.name == device.name).and_then(|hca| hca.uverbs.as_ref());
            // Without the folder nothing is known, and all are shown.
            names.is_empty() || uverbs.is_some_and(|one| names.contains(one))
        });
        VerifyEnd {
            host: facts.hostname.clone().unwrap_or_else(|| "unknown".to_owned()),
            node,
            rails: devices.flat_map(|d| d.ports.iter().map(|p| identify_rail(&facts, d, p))).collect(),
            node_guids: facts.devices.iter().filter_map(|device| device.node_guid.clone()).collect(),
        }
    }
}

/// Whether two ends share an HCA or a node, in a sentence.
pub fn shared_hardware(here: &VerifyEnd, there: &VerifyEnd) -> Option<String> {
    let known = here.rails.iter().filter(|own| own.guid.is_some());
    let common = known.filter(|own| there.rails.iter().any(|other| other.guid == own.guid));
    let common: Vec<&str> = common.map(|own| own.hca.as_str()).collect();
    if !common.is_empty() {
        return Some(format!("both pods are on one node and share {}: the cables are not tested", common.join(", ")));
    }
    let one_name = here.node.is_some() && here.node == there.node;
    if one_name || here.node_guids.iter().any(|guid| there.node_guids.contains(guid)) {
        return Some(
            "both pods are on one node, with HCAs of their own: paths between nodes are not tested".to_owned(),
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(node: Option<&str>, given: &str, all: &[&str]) -> VerifyEnd {
        let rail =
            RailIdentity { hca: format!("hca-{given}"), guid: Some(given.to_owned()), ..RailIdentity::default() };
        VerifyEnd {
            node: node.map(str::to_owned),
            rails: vec![rail],
            node_guids: all.iter().map(|guid| (*guid).to_owned()).collect(),
            ..VerifyEnd::default()
        }
    }

    #[test]
    fn a_shared_hca_and_a_shared_node_are_told_apart() {
        let said = |a: &VerifyEnd, b: &VerifyEnd| shared_hardware(a, b).unwrap_or_default();
        let (one, two) = (end(None, "1", &["1", "2"]), end(None, "2", &["1", "2"]));
        assert!(said(&one, &one).contains("share hca-1"));
        assert!(said(&one, &two).contains("HCAs of their own"));
        assert_eq!(said(&one, &end(None, "3", &["3"])), "");
        assert!(said(&end(Some("n"), "1", &["1"]), &end(Some("n"), "3", &["3"])).contains("on one node"));
    }
}
