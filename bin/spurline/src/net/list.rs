//! `spurline net list`: prints devices, ports and interfaces as a table, from the facts of the fabric crate.

use super::facts::FromArgs;
use super::table::{BAD, DIM, GOOD, HEAD, StyledCell, WARN, append_table, styled_cell};
use clap::Args;
use serde_json::json;
use spurline_config::Fault;
use spurline_fabric::{
    DevicePort, GidType, HostFacts, IpoibMode, LinkLayer, ManagementDevice, NetInterface, PortState, RdmaDevice,
};
use std::fmt::Write as _;
use std::process::ExitCode;

/// The arguments of `net list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub from: FromArgs,
    /// Show every GID of every port, with index, type and interface
    #[arg(long)]
    pub gids: bool,
    /// Show every counter that is not zero, not only those that indicate errors
    #[arg(long)]
    pub counters: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Counters that indicate errors on the link or in the fabric, under the names of all drivers.
const ERROR_COUNTERS: &[&str] = &[
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "implied_nak_seq_err",
    "rnr_nak_retry_err",
    "rx_icrc_encapsulated",
    "np_cnp_sent",
    "rp_cnp_handled",
    "np_ecn_marked_roce_packets",
    "cnpSent",
    "cnpHandled",
    "cnp_sent",
    "cnp_handled",
    "RetransSegs",
    "tcpRetransSegs",
    "retrans_pkts",
    "retrans_timeout_events",
    "rx_drops",
    "seq_err_naks_rcvd",
    "to_retransmits",
    "oos_drop_count",
    "retry_exceeded_error",
    "completer_retry_err",
    "rcvd_seq_err",
    "send_rnr_err",
    "ack_deferred",
    "roce_adp_retrans",
];

/// Runs the command.
///
/// # Errors
/// When `--from` names no facts.
pub fn run(args: ListArgs) -> Result<ExitCode, Fault> {
    let tree = args.from.tree()?;
    let host = HostFacts::read_from(&tree);
    if args.json {
        anstream::println!("{}", json!(host));
        return Ok(ExitCode::SUCCESS);
    }
    anstream::print!("{}", host_text(&host, &args));
    Ok(ExitCode::SUCCESS)
}

fn host_text(host: &HostFacts, args: &ListArgs) -> String {
    let mut out = String::new();
    if host.devices.is_empty() {
        let _ = writeln!(out, "{DIM}no RDMA device{DIM:#}");
    } else {
        ports_table(&mut out, host);
        out.push('\n');
        devices_table(&mut out, host);
    }
    out.push('\n');
    interfaces_table(&mut out, host);
    let all = || host.devices.iter().flat_map(|d| d.ports.iter().map(move |p| (d, p)));
    if args.gids {
        gid_table(&mut out, all());
    }
    counters_table(&mut out, all(), args.counters);
    if !host.left_out.is_empty() {
        let first = &host.left_out[0];
        let _ = writeln!(
            out,
            "\n{DIM}{} files could not be read (the first: {}: {}){DIM:#}",
            host.left_out.len(),
            first.path,
            first.why
        );
    }
    out
}

fn text_or_dash(text: Option<impl ToString>) -> String {
    text.map_or_else(|| "-".to_owned(), |t| t.to_string())
}

fn table_row(words: &[&str]) -> Vec<StyledCell> {
    words.iter().map(|w| styled_cell(*w, HEAD)).collect()
}

fn ports_table(out: &mut String, host: &HostFacts) {
    let heads =
        ["DEVICE", "PORT", "NETDEV", "LINK", "STATE", "PHYSICAL", "RATE", "MTU", "IPOIB", "LID", "SM LID", "GIDS"];
    let mut rows = vec![table_row(&heads)];
    for device in &host.devices {
        for port in &device.ports {
            rows.push(port_row(host, device, port));
        }
    }
    append_table(out, &rows);
}

fn port_row(host: &HostFacts, device: &RdmaDevice, port: &DevicePort) -> Vec<StyledCell> {
    let netdev = port.netdevs.first();
    let interface = netdev.and_then(|n| host.interface(n));
    let state = match port.state {
        PortState::Active => GOOD,
        PortState::Init | PortState::Armed => WARN,
        _ => BAD,
    };
    let is_ib = port.link_layer == LinkLayer::InfiniBand;
    // Ethernet has neither subnet manager nor LID.
    let lid = |lid: Option<u32>| if is_ib { text_or_dash(lid) } else { "-".to_owned() };
    let sm = if is_ib && port.sm_lid == Some(0) { BAD } else { Default::default() };
    let v2 = port.gids.iter().filter(|g| g.kind == GidType::RoceV2).map(|g| g.index).collect::<Vec<_>>();
    let gids = match v2.as_slice() {
        [] => port.gids.len().to_string(),
        [first, ..] => format!("{} (v2 from {first})", port.gids.len()),
    };
    let more = match port.netdevs.len() {
        0 | 1 => String::new(),
        n => format!(" +{}", n - 1),
    };
    let named = match (netdev, interface) {
        (Some(name), _) => format!("{name}{more}"),
        // The kernel shows the interface of a GID only inside the interface's network namespace.
        (None, _) if port.link_layer == LinkLayer::Ethernet && port.state == PortState::Active => {
            "(other namespace)".to_owned()
        }
        (None, _) => "-".to_owned(),
    };
    vec![
        styled_cell(&device.name, Default::default()),
        styled_cell(port.number.to_string(), Default::default()),
        styled_cell(named, Default::default()),
        styled_cell(link_word(device, port), Default::default()),
        styled_cell(port.state.as_str(), state),
        styled_cell(port.phys_state.as_str(), Default::default()),
        styled_cell(text_or_dash(port.rate.as_ref().map(|r| r.describe())), Default::default()),
        styled_cell(text_or_dash(interface.and_then(|i| i.mtu)), Default::default()),
        styled_cell(text_or_dash(interface.and_then(|i| i.ipoib_mode).map(IpoibMode::as_str)), Default::default()),
        styled_cell(lid(port.lid), Default::default()),
        styled_cell(lid(port.sm_lid), sm),
        styled_cell(gids, Default::default()),
    ]
}

fn link_word(device: &RdmaDevice, port: &DevicePort) -> &'static str {
    match (port.link_layer, device.protocol.as_deref(), device.node_type.as_deref()) {
        (LinkLayer::InfiniBand, ..) if device.is_omni_path() => "Omni-Path",
        (LinkLayer::InfiniBand, ..) => "InfiniBand",
        (LinkLayer::Ethernet, ..) if device.is_iwarp() => "Ethernet iWARP",
        (LinkLayer::Ethernet, Some("roce"), _) | (LinkLayer::Ethernet, None, Some("CA")) => "Ethernet RoCE",
        (LinkLayer::Ethernet, ..) => "Ethernet",
        (LinkLayer::Unknown, ..) if device.is_efa() => "EFA",
        (LinkLayer::Unknown, ..) => "unknown",
    }
}

fn devices_table(out: &mut String, host: &HostFacts) {
    let mut rows =
        vec![table_row(&["DEVICE", "PCI", "ID", "MODEL", "DRIVER", "FIRMWARE", "NUMA", "PCIE", "FUNCTIONS"])];
    for device in &host.devices {
        let pci = device.pci.clone().unwrap_or_default();
        let pcie = pci.speed.zip(pci.width).map(|(s, w)| format!("{} GT/s x{w}", f64::from(s) / 10.0));
        let is_slow =
            pci.speed.is_some() && pci.speed < pci.max_speed || pci.width.is_some() && pci.width < pci.max_width;
        let functions = match (&pci.physical, pci.virtual_functions) {
            (Some(parent), _) => format!("VF of {parent}"),
            (None, Some((made, most))) => format!("{made} of {most} VFs"),
            (None, None) => "-".to_owned(),
        };
        let software = device.parent.as_ref().map(|p| format!("software on {p}"));
        rows.push(vec![
            styled_cell(&device.name, Default::default()),
            styled_cell(text_or_dash(pci.address.as_ref()), Default::default()),
            styled_cell(text_or_dash(pci.id_text()), Default::default()),
            styled_cell(
                text_or_dash(pci.known_model.map(str::to_owned).or(software).or(device.hca_type.clone())),
                Default::default(),
            ),
            styled_cell(text_or_dash(pci.driver.as_ref()), Default::default()),
            styled_cell(text_or_dash(device.firmware.as_ref()), Default::default()),
            styled_cell(text_or_dash(pci.numa_node), Default::default()),
            styled_cell(text_or_dash(pcie), if is_slow { WARN } else { Default::default() }),
            styled_cell(functions, Default::default()),
        ]);
    }
    rows.extend(host.management.iter().map(|device| management_row(host, device)));
    append_table(out, &rows);
}

/// A device of type SMI, which has no port that carries data.
fn management_row(host: &HostFacts, management: &ManagementDevice) -> Vec<StyledCell> {
    let parent = host.devices.iter().find(|device| device.name == management.parent);
    let address = parent.and_then(|device| device.pci.as_ref()?.address.as_ref());
    let what = format!("management of {} (SMI), no data", management.parent);
    let words = [management.device.clone(), text_or_dash(address), "-".to_owned(), what];
    let unknown = std::iter::repeat_n("-".to_owned(), 5);
    words.into_iter().chain(unknown).map(|word| styled_cell(word, DIM)).collect()
}

fn interfaces_table(out: &mut String, host: &HostFacts) {
    let mut rows = vec![table_row(&["INTERFACE", "KIND", "ON", "STATE", "MTU", "MOST", "SPEED", "RDMA", "ADDRESSES"])];
    for i in &host.interfaces {
        let up = match i.operstate.as_deref() {
            Some("up") => GOOD,
            Some("down" | "lowerlayerdown") => BAD,
            _ => Default::default(),
        };
        let addresses: Vec<String> = i.addresses.iter().map(|(ip, prefix)| format!("{ip}/{prefix}")).collect();
        rows.push(vec![
            styled_cell(&i.name, Default::default()),
            styled_cell(interface_kind(i), Default::default()),
            styled_cell(stands_on(i), Default::default()),
            styled_cell(text_or_dash(i.operstate.as_ref()), up),
            styled_cell(text_or_dash(i.mtu), Default::default()),
            styled_cell(text_or_dash(i.max_mtu), DIM),
            styled_cell(
                text_or_dash(i.speed_mbps.map(|s| format!("{} Gb/s", f64::from(s) / 1000.0))),
                Default::default(),
            ),
            styled_cell(text_or_dash(i.rdma.as_ref().map(|(d, p)| format!("{d}/{p}"))), Default::default()),
            styled_cell(if addresses.is_empty() { "-".to_owned() } else { addresses.join(" ") }, Default::default()),
        ]);
    }
    append_table(out, &rows);
}

fn interface_kind(i: &NetInterface) -> String {
    match (i.kind.as_deref(), i.vlan) {
        (_, Some(vlan)) => format!("vlan {vlan}"),
        (Some("bond"), _) => format!("bond {}", text_or_dash(i.bond_mode.as_ref())),
        _ if i.is_ipoib() => match i.ipoib_mode {
            Some(mode) => format!("ipoib {}", mode.as_str()),
            None => "ipoib".to_owned(),
        },
        (Some(kind), _) => kind.to_owned(),
        _ if i.is_loopback() => "loopback".to_owned(),
        _ if i.hardware == Some(1) => "ethernet".to_owned(),
        _ => text_or_dash(i.hardware),
    }
}

fn stands_on(i: &NetInterface) -> String {
    if i.lower_is_elsewhere {
        return "(other namespace)".to_owned();
    }
    let below: Vec<&str> = i.lower.iter().chain(&i.parent).map(String::as_str).collect();
    match (&i.master, below.is_empty()) {
        (Some(master), _) => format!("in {master}"),
        (None, false) => below.join(" "),
        (None, true) => text_or_dash(i.pci.as_ref().and_then(|p| p.address.as_ref())),
    }
}

fn gid_table<'a>(out: &mut String, all: impl Iterator<Item = (&'a RdmaDevice, &'a DevicePort)>) {
    let mut rows = vec![table_row(&["DEVICE", "PORT", "INDEX", "GID", "IP", "TYPE", "NETDEV"])];
    for (device, port) in all {
        for gid in &port.gids {
            let ip = gid.address.to_ipv4_mapped();
            let words =
                [device.name.clone(), port.number.to_string(), gid.index.to_string(), full_address(gid.address)];
            let more = [text_or_dash(ip), gid.kind.to_string(), text_or_dash(gid.netdev.as_ref())];
            rows.push(words.into_iter().chain(more).map(|w| styled_cell(w, Default::default())).collect());
        }
    }
    out.push('\n');
    append_table(out, &rows);
}

/// The kernel's notation, for searches.
fn full_address(address: std::net::Ipv6Addr) -> String {
    address.segments().map(|s| format!("{s:04x}")).join(":")
}

fn counters_table<'a>(out: &mut String, all: impl Iterator<Item = (&'a RdmaDevice, &'a DevicePort)>, every: bool) {
    let mut rows = vec![table_row(&["DEVICE", "PORT", "COUNTER", "VALUE"])];
    for (device, port) in all {
        for (name, value) in port.counters.iter().filter(|(name, _)| every || ERROR_COUNTERS.contains(&name.as_str())) {
            let style = if ERROR_COUNTERS.contains(&name.as_str()) { WARN } else { Default::default() };
            rows.push(vec![
                styled_cell(&device.name, Default::default()),
                styled_cell(port.number.to_string(), Default::default()),
                styled_cell(name, style),
                styled_cell(value.to_string() + if port.is_saturated(name) { " (its end)" } else { "" }, style),
            ]);
        }
    }
    if rows.len() > 1 {
        out.push('\n');
        append_table(out, &rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_fabric::{HostTree, TreeEntry};
    use spurline_testkit::hosts;

    /// The text about a made-up host.
    fn listed(made: &hosts::Made) -> String {
        let tree = HostTree::from_memory(made.entries(TreeEntry::File, TreeEntry::Link));
        let args = ListArgs { from: FromArgs { from: None }, gids: false, counters: false, json: false };
        host_text(&HostFacts::read_from(&tree), &args)
    }

    #[test]
    fn networks_rates_and_counters_are_named_as_they_are() {
        let mut omni_path = hosts::omni_path();
        let port = "sys/devices/pci0000:5e/0000:5e:00.0/infiniband/hfi1_0/ports/1";
        omni_path.put(&format!("{port}/counters/link_downed"), "255");
        let text = listed(&omni_path);
        assert!(text.contains("Omni-Path") && text.contains("255 (its end)") && !text.contains("InfiniBand"), "{text}");
        assert!(listed(&hosts::efa()).contains("EFA"));
        let xdr = listed(&hosts::xdr());
        assert!(xdr.contains("management of mlx5_0 (SMI)") && xdr.matches("smi0").count() == 1, "{xdr}");
        let planes = listed(&hosts::planes());
        assert!(planes.contains("mlx5_0/12") && planes.matches("eth_p3").count() == 2, "{planes}");
        let iwarp = listed(&hosts::on_board_iwarp());
        assert!(iwarp.contains("10 Gb/s") && !iwarp.contains("QDR") && !iwarp.contains("2.5 GT/s"), "{iwarp}");
    }
}
