//! Checks of ports: state, subnet manager, rate and width, link layer, counters.

use crate::change::HostChange;
use crate::device::{DevicePort, LinkLayer, PhysState, PortState, RdmaDevice};
use crate::doctor::{CheckInput, SmAnswer, port_name, port_path};
use crate::finding::{HostFinding, Severity, id};

/// Runs the checks.
pub fn check_ports(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    for (device, port) in case.all_ports() {
        check_state(case, device, port, found);
        if port.state == PortState::Active {
            check_rate(case, device, port, found);
        }
        check_layer(case, device, port, found);
        check_counters(device, port, found);
    }
    check_firmware(case, found);
}

fn check_state(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let (name, path) = (port_name(device, port), port_path(device, port));
    let is_ib = port.link_layer == LinkLayer::InfiniBand;
    let mut add = |id, severity, evidence: String, remedy: &str| {
        found.push(HostFinding::new(id, severity, &name, evidence, remedy));
    };
    // An unused port may have no cable; one with an address, or a required one, must have.
    let down = if case.is_used(port) { Severity::Error } else { Severity::Warning };
    let states = format!("{path}/state is {}, phys_state is {}", port.state.as_str(), port.phys_state.as_str());
    match port.state {
        PortState::Init | PortState::Armed if is_ib => {
            let sm = port.sm_lid.map_or(String::new(), |l| format!(", sm_lid is {l:#x}"));
            add(
                id::NO_SUBNET_MANAGER,
                Severity::Error,
                format!("{states}{sm}: the link is up, but no subnet manager has configured the port"),
                "on ONE host of the fabric, unless the switch runs one: apt-get install opensm && systemctl enable --now opensm (dnf install opensm on RHEL and Rocky)",
            );
        }
        PortState::Down | PortState::Init | PortState::Armed => port_down(case, device, port, down, states, found),
        PortState::Active | PortState::ActiveDefer if is_ib => {
            let asked = case.options.subnet_manager.get(&(device.name.clone(), port.number));
            if port.sm_lid == Some(0) {
                add(
                    id::NO_SUBNET_MANAGER,
                    Severity::Error,
                    format!(
                        "{path}/sm_lid is 0x0 although state is ACTIVE: no subnet manager has run since the port was restarted"
                    ),
                    "systemctl start opensm on one host of the fabric, or check the one on the switch",
                );
            } else if let Some(SmAnswer::Silent(words)) = asked {
                add(
                    id::SM_SILENT,
                    Severity::Error,
                    format!(
                        "{path}/sm_lid is {:#x}, and that subnet manager does not respond ({words}); existing connections continue, but a port that goes down does not come back",
                        port.sm_lid.unwrap_or(0)
                    ),
                    "on the host that ran it: systemctl status opensm; anywhere in the fabric: apt-get install opensm && systemctl enable --now opensm",
                );
            }
        }
        _ => {}
    }
}

fn port_down(
    case: &CheckInput<'_>,
    device: &RdmaDevice,
    port: &DevicePort,
    severity: Severity,
    states: String,
    found: &mut Vec<HostFinding>,
) {
    let name = port_name(device, port);
    let is_ib = port.link_layer == LinkLayer::InfiniBand;
    let off: Vec<&String> = port.netdevs.iter().filter(|n| case.host.interface(n).is_some_and(|i| !i.is_up)).collect();
    let ups = off.iter().map(|n| HostChange::Up { interface: (*n).clone() });
    match port.phys_state {
        PhysState::Polling | PhysState::Sleep | PhysState::Training if is_ib => found.push(HostFinding::new(
            id::PORT_POLLING,
            severity,
            name,
            format!("{states}: no device is detected at the other end of the cable"),
            "plug the cable in at both ends (dmesg reports it); try another cable and another switch port; two hosts can be joined back to back; an unused port may stay down",
        )),
        _ => {
            let others = if is_ib {
                format!("ibportstate {} {} enable, or restart the driver; the switch port may be switched off too", port.lid.unwrap_or(0), port.number)
            } else {
                "look at the cable, the transceiver (ethtool -m) and the switch port".to_owned()
            };
            found.push(HostFinding::new(id::PORT_DOWN, severity, name, states, others).with_changes(ups));
        }
    }
}

fn check_rate(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let Some(rate) = &port.rate else { return };
    let (name, path) = (port_name(device, port), port_path(device, port));
    let evidence = format!("{path}/rate is {}", rate.describe());
    let model = device.pci.as_ref().and_then(|p| p.model());
    // Ethernet has one lane or four depending on its speed, and HDR100 splits a port in two: only a single lane is a
    // fault.
    if port.link_layer == LinkLayer::InfiniBand && rate.lanes == 1 {
        found.push(HostFinding::new(
            id::LINK_WIDTH,
            Severity::Warning,
            &name,
            format!("{evidence}: one lane of four"),
            "reseat or change the cable; dirty optics and bent pins cost lanes; then ibportstate LID PORT reset",
        ));
        return;
    }
    let same =
        |d: &RdmaDevice| d.pci.as_ref().and_then(|p| p.id_text()) == device.pci.as_ref().and_then(|p| p.id_text());
    let siblings =
        case.all_ports().filter(|(d, p)| same(d) && p.state == PortState::Active && p.link_layer == port.link_layer);
    let best =
        siblings.filter_map(|(d, p)| Some((port_name(d, p), p.rate.as_ref()?.gbps))).max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((other, most)) = best.filter(|(_, most)| *most > rate.gbps * 1.01 && device.pci.is_some()) {
        found.push(HostFinding::new(
            id::LINK_RATE,
            Severity::Warning,
            name,
            format!("{evidence}; {other}, the same card, runs {most} Gb/s"),
            "swap the two cables: when the slow rate moves with the cable, it is the cable; otherwise look at the speed set on the switch port",
        ));
    } else if let Some(model) = model.filter(|m| f64::from(m.most_gbps) > rate.gbps * 1.01) {
        let slow = rate.gbps * 2.0 < f64::from(model.most_gbps) * 0.99;
        found.push(HostFinding::new(
            id::LINK_RATE,
            if slow { Severity::Warning } else { Severity::Info },
            name,
            format!("{evidence}; the fastest {} does {} Gb/s", model.name, model.most_gbps),
            "normal when the card's variant (board_id), the cable or the switch does no more; otherwise look at the cable, and at the speed set on the switch port",
        ));
    }
}

fn check_layer(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    if port.link_layer == LinkLayer::Unknown {
        return;
    }
    let (name, path) = (port_name(device, port), port_path(device, port));
    let word = |layer: LinkLayer| if layer == LinkLayer::InfiniBand { "InfiniBand" } else { "Ethernet" };
    let number = if port.link_layer == LinkLayer::InfiniBand { 2 } else { 1 };
    let address = device.pci.as_ref().and_then(|p| p.address.clone()).unwrap_or_else(|| "PCI-ADDRESS".into());
    let remedy = format!(
        "a VPI card changes it: mlxconfig -d {address} set LINK_TYPE_P{}={number}, then restart the host (mstconfig of the package mstflint does the same); ConnectX-3: echo {} > /sys/bus/pci/devices/{address}/mlx4_port{}",
        port.number.max(1),
        if number == 2 { "eth" } else { "ib" },
        port.number
    );
    let evidence = format!("{path}/link_layer is {}", word(port.link_layer));
    if case.options.expect.is_some_and(|wanted| wanted != port.link_layer) {
        found.push(HostFinding::new(
            id::LINK_LAYER,
            Severity::Error,
            name,
            format!("{evidence}, but --expect requires the other"),
            remedy,
        ));
        return;
    }
    // An interface named ib0 on Ethernet, or the reverse, suggests a wrong link layer.
    for netdev in &port.netdevs {
        let Some(interface) = case.host.interface(netdev) else { continue };
        let named_ib = netdev.starts_with("ib");
        let is_ib = port.link_layer == LinkLayer::InfiniBand;
        if named_ib != is_ib
            && (named_ib || netdev.starts_with("eth"))
            && interface.master.is_none()
            && device.pci.is_some()
        {
            found.push(HostFinding::new(
                id::LINK_LAYER,
                Severity::Warning,
                &name,
                format!("{evidence}, and its interface is called {netdev}"),
                &remedy,
            ));
            return;
        }
    }
    // Two ports of one card with different link layers: valid, but often unintended.
    let slot =
        |d: &RdmaDevice| d.pci.as_ref().and_then(|p| p.address.as_ref()?.rsplit_once('.').map(|(s, _)| s.to_owned()));
    let other = case.all_ports().find(|(d, p)| {
        slot(device).is_some()
            && slot(d) == slot(device)
            && p.link_layer != LinkLayer::Unknown
            && p.link_layer != port.link_layer
    });
    if let Some((d, p)) = other.filter(|_| port.link_layer == LinkLayer::Ethernet) {
        found.push(HostFinding::new(
            id::LINK_LAYER,
            Severity::Info,
            name,
            format!("{evidence}, and {} of the same card is {}", port_name(d, p), word(p.link_layer)),
            remedy,
        ));
    }
}

/// The sum of counters that mean the same in different drivers.
fn sum_counters(port: &DevicePort, names: &[&str]) -> (u64, String) {
    let all: Vec<(&str, u64)> = names.iter().filter_map(|n| port.counters.get(*n).map(|v| (*n, *v))).collect();
    let words = all.iter().map(|(n, v)| format!("{n} {v}")).collect::<Vec<_>>().join(", ");
    (all.iter().fold(0, |sum: u64, (_, v)| sum.saturating_add(*v)), words)
}

fn check_counters(device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let (name, path) = (port_name(device, port), port_path(device, port));
    let (errors, words) = sum_counters(
        port,
        &[
            "symbol_error",
            "link_error_recovery",
            "link_downed",
            "port_rcv_errors",
            "port_rcv_remote_physical_errors",
            "local_link_integrity_errors",
            "excessive_buffer_overrun_errors",
            "rx_icrc_encapsulated",
        ],
    );
    if errors > 0 {
        // Plugging in a cable causes a few errors.
        let severity = if errors > 100 { Severity::Warning } else { Severity::Info };
        found.push(HostFinding::new(
            id::PORT_ERRORS,
            severity,
            &name,
            format!("{path}/counters: {words}"),
            "counters are since the driver started: look again after a minute, and change the cable if they grow (perfquery -R sets them to zero)",
        ));
    }
    let (again, words) = sum_counters(
        port,
        &[
            "out_of_sequence",
            "packet_seq_err",
            "local_ack_timeout_err",
            "implied_nak_seq_err",
            "rnr_nak_retry_err",
            "roce_adp_retrans",
            "tcpRetransSegs",
            "RetransSegs",
            "retrans_pkts",
            "seq_err_naks_rcvd",
            "to_retransmits",
            "oos_drop_count",
            "completer_retry_err",
            "retry_exceeded_error",
            "port_xmit_discards",
            "rx_drops",
        ],
    );
    if again > 0 {
        let is_ib = port.link_layer == LinkLayer::InfiniBand;
        let remedy = if is_ib {
            "look for a bad link on the way: ibqueryerrors"
        } else {
            "packets are lost on the way: PFC or ECN on host and switch (ROCE-FLOW-CONTROL), equal MTUs on the way, and cables"
        };
        let severity = if again > 1000 { Severity::Warning } else { Severity::Info };
        found.push(HostFinding::new(
            id::RETRANSMISSIONS,
            severity,
            &name,
            format!("{path}/hw_counters: {words}"),
            remedy,
        ));
    }
    let (marks, words) = sum_counters(
        port,
        &[
            "np_cnp_sent",
            "rp_cnp_handled",
            "np_ecn_marked_roce_packets",
            "cnp_sent",
            "cnp_handled",
            "cnpSent",
            "cnpHandled",
        ],
    );
    if marks > 0 {
        found.push(HostFinding::new(
            id::CONGESTION,
            Severity::Info,
            name,
            format!("{path}/hw_counters: {words}"),
            "congestion control works as intended; if the counters grow all the time, several hosts send more to one than its link carries",
        ));
    }
}

fn check_firmware(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    let mut seen: Vec<(&str, &str, &str)> = Vec::new();
    for device in &case.host.devices {
        let (Some(board), Some(firmware)) = (device.board_id.as_deref(), device.firmware.as_deref()) else { continue };
        match seen.iter().find(|(b, ..)| *b == board) {
            None => seen.push((board, firmware, &device.name)),
            Some((_, other, first)) if *other != firmware => found.push(HostFinding::new(
                id::FIRMWARE_MIXED,
                Severity::Info,
                &device.name,
                format!(
                    "/sys/class/infiniband/{}/fw_ver is {firmware}; {first}, the same board {board}, has {other}",
                    device.name
                ),
                "bring both to the newer one: mlxfwmanager --online -u, or mstflint, then restart the host",
            )),
            Some(_) => {}
        }
    }
}
