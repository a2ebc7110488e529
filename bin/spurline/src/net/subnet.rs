//! Queries the subnet manager of each InfiniBand port of this host. The doctor draws the conclusions.

use spurline_fabric::{HostFacts, HostTree, LinkLayer, PortState, SmAnswer};
use spurline_umad::{SmResponse, Umad};
use std::collections::BTreeMap;
use std::path::Path;

/// The answers, by device and port; empty for facts of another host.
pub fn query_subnet_manager(tree: &HostTree) -> BTreeMap<(String, u32), SmAnswer> {
    // A host without an InfiniBand port loads no library and sends no query.
    if !tree.is_live() || !tree.exists("sys/class/infiniband") {
        return BTreeMap::new();
    }
    let host = HostFacts::read_from(tree);
    let all = host.devices.iter().flat_map(|d| d.ports.iter().map(move |p| (d, p)));
    let ports: Vec<_> = all
        .filter(|(_, p)| p.link_layer == LinkLayer::InfiniBand && p.state == PortState::Active)
        .filter_map(|(d, p)| Some((d, p, p.sm_lid.filter(|lid| *lid > 0)?)))
        .collect();
    if ports.is_empty() {
        return BTreeMap::new();
    }
    let umad = if Path::new("/sys/class/infiniband_mad/abi_version").exists() {
        Umad::open().map_err(|e| e.to_string())
    } else {
        Err("ib_umad is not loaded: modprobe ib_umad".to_owned())
    };
    let mut silent: Vec<(u32, Vec<u16>)> = Vec::new();
    let mut answers = BTreeMap::new();
    for (device, port, sm_lid) in ports {
        // Ports of the same subnet have the same manager; a manager that does not answer is queried once.
        let subnet = port.gids.first().map(|g| g.address.segments()[..4].to_vec()).unwrap_or_default();
        let fabric = (sm_lid, subnet);
        let answer = match &umad {
            Err(why) => SmAnswer::QueryFailed(why.clone()),
            Ok(_) if silent.contains(&fabric) => SmAnswer::Silent("as asked through another port".to_owned()),
            Ok(umad) => match umad.query_sm(&device.name, port.number, sm_lid) {
                Ok(SmResponse::Alive { .. }) => SmAnswer::Alive,
                Ok(SmResponse::Silent(why)) => {
                    silent.push(fabric);
                    SmAnswer::Silent(why)
                }
                Err(e) => SmAnswer::QueryFailed(e.to_string()),
            },
        };
        answers.insert((device.name.clone(), port.number), answer);
    }
    answers
}
