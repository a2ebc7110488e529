//! Checks of ports: state, subnet manager, rate and width, link layer, counters.

use crate::change::HostChange;
use crate::device::{DevicePort, LinkLayer, PhysState, PortState, RdmaDevice};
use crate::doctor::{CheckInput, SmAnswer, port_name, port_path};
use crate::finding::{HostFinding, Severity, id};

/// PCI vendor of the cards whose link layer can be configured.
const VPI_VENDOR: u16 = 0x15b3;
/// More link errors than plugging in a cable causes.
const MANY_LINK_ERRORS: u64 = 100;
/// More lost packets than a start of the fabric causes.
const MANY_LOST_PACKETS: u64 = 1000;

/// Runs the checks.
pub fn check_ports(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    for (device, port) in case.all_ports().filter(|(device, port)| !device.leaves_unused(port)) {
        check_state(case, device, port, found);
        if port.state == PortState::Active && !case.is_idle_function(device, port) {
            check_rate(case, device, port, found);
        }
        check_layer(case, device, port, found);
        check_counters(device, port, found);
    }
    check_firmware(case, found);
}

fn check_state(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let is_ib = port.link_layer == LinkLayer::InfiniBand;
    match port.state {
        PortState::Active | PortState::ActiveDefer if is_ib => check_manager(case, device, port, found),
        PortState::Active | PortState::ActiveDefer | PortState::Unknown => {}
        _ if is_ib && device.is_virtual() => virtual_port_down(case, device, port, found),
        _ if case.is_idle_function(device, port) => {}
        PortState::Init | PortState::Armed if is_ib => port_not_configured(case, device, port, found),
        PortState::Down | PortState::Init | PortState::Armed => port_down(case, device, port, found),
    }
}

/// `…/state is INIT, phys_state is LinkUp`.
pub(super) fn describe_states(device: &RdmaDevice, port: &DevicePort) -> String {
    let path = port_path(device, port);
    format!("{path}/state is {}, phys_state is {}", port.state.as_str(), port.phys_state.as_str())
}

/// An unused port may have no cable; a port with an address, or a required port, must have a cable.
fn down_severity(case: &CheckInput<'_>, port: &DevicePort) -> Severity {
    if case.is_used(port) { Severity::Error } else { Severity::Warning }
}

/// The program that configures the ports of a device's fabric.
fn manager_word(device: &RdmaDevice) -> &'static str {
    if device.is_omni_path() { "fabric manager" } else { "subnet manager" }
}

/// How a manager is started where the fabric has none.
fn start_manager(device: &RdmaDevice) -> &'static str {
    if device.is_omni_path() {
        "on ONE host of the fabric, unless the switch runs one: dnf install opa-fm (apt-get install opa-fm), then systemctl \
         enable --now opafm; opensm does not manage Omni-Path"
    } else {
        "on ONE host of the fabric, unless the switch runs one: apt-get install opensm && systemctl enable --now opensm (dnf \
         install opensm on RHEL and Rocky)"
    }
}

/// The manager's service, for messages.
fn manager_service(device: &RdmaDevice) -> &'static str {
    if device.is_omni_path() { "opafm" } else { "opensm" }
}

fn check_manager(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let name = port_name(device, port);
    let path = port_path(device, port);
    let manager = manager_word(device);
    let service = manager_service(device);
    let answer = case.options.subnet_manager.get(&(device.name.clone(), port.number));
    if port.sm_lid == Some(0) {
        found.push(HostFinding::new(
            id::NO_SUBNET_MANAGER,
            Severity::Error,
            name,
            format!("{path}/sm_lid is 0x0 although state is ACTIVE: no {manager} has run since the port was restarted"),
            format!("systemctl start {service} on one host of the fabric, or check the {manager} of the switch"),
        ));
    } else if let Some(SmAnswer::Silent(words)) = answer {
        found.push(HostFinding::new(
            id::SM_SILENT,
            Severity::Error,
            name,
            format!(
                "{path}/sm_lid is {:#x}, and that {manager} does not respond ({words}); existing connections continue, but a port that goes down does not come back",
                port.sm_lid.unwrap_or(0)
            ),
            format!("on the host that ran it: systemctl status {service}; if that host is gone: {}", start_manager(device)),
        ));
    }
}

/// A physical port whose link is up and that no manager has configured.
fn port_not_configured(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let states = describe_states(device, port);
    let manager = manager_word(device);
    let (evidence, remedy) = match port.sm_lid {
        Some(lid @ 1..) => {
            let evidence = format!(
                "{states}, sm_lid is {lid:#x}: the {manager} with that LID is known and has not made the port active"
            );
            let remedy = format!(
                "on the host or switch with LID {lid}: see that the {manager} runs (systemctl status {}) and what its log says about this port; start no second {manager} beside it",
                manager_service(device)
            );
            (evidence, remedy)
        }
        lid => {
            let shown = lid.map_or(String::new(), |lid| format!(", sm_lid is {lid:#x}"));
            let evidence = format!("{states}{shown}: the link is up, but no {manager} has configured the port");
            let managed = case.all_ports().find(|(other, active)| {
                other.is_omni_path() == device.is_omni_path()
                    && active.link_layer == LinkLayer::InfiniBand
                    && active.state == PortState::Active
                    && active.sm_lid.is_some_and(|lid| lid > 0)
            });
            let beside = managed.map_or(String::new(), |(other, active)| {
                format!(
                    "if this port and {} are cabled to one fabric, see the log of its {manager} (LID {}), and start no second {manager}; otherwise ",
                    port_name(other, active),
                    active.sm_lid.unwrap_or(0)
                )
            });
            (evidence, format!("{beside}{}", start_manager(device)))
        }
    };
    found.push(HostFinding::new(id::NO_SUBNET_MANAGER, Severity::Error, port_name(device, port), evidence, remedy));
}

/// A virtual function's port that is not active. Such a port has no cable, and no separate `ibportstate`: GUID, policy and the
/// subnet manager decide. The finding about a GUID of zero says the first of these causes.
fn virtual_port_down(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    if device.has_zero_guid() {
        return;
    }
    let pci = device.pci.as_ref();
    let physical = pci.and_then(|pci| pci.physical.as_deref());
    let parent = case.all_ports().find(|(other, active)| {
        let address = other.pci.as_ref().and_then(|pci| pci.address.as_deref());
        physical.is_some() && address == physical && active.number == port.number
    });
    let sm = port.sm_lid.filter(|lid| *lid > 0).map_or(String::new(), |lid| format!(", sm_lid is {lid:#x}"));
    let mut evidence = format!("{}{sm}: a virtual function", describe_states(device, port));
    let policy = pci.and_then(|pci| case.machine.vf_policies.get(pci.address.as_ref()?));
    if let Some(policy) = policy {
        evidence.push_str(&format!(", {} is {}", policy.file, policy.word));
    }
    let rebind = "then unbind and bind the virtual function";
    let virtualisation = "a subnet manager configures virtual functions only with virtualisation: opensm with virt_enabled 2 in opensm.conf, a switch with `ib sm virt enable`";
    let remedy = match (policy, parent) {
        (Some(policy), _) if policy.word == "Down" => format!("echo Follow > {}, {rebind}", policy.file),
        (_, Some((other, active))) if active.state == PortState::Active => {
            let name = port_name(other, active);
            evidence.push_str(&format!("; its physical function {name} is ACTIVE"));
            let lid = active.sm_lid.unwrap_or(0);
            format!("{virtualisation}; it is the subnet manager with LID {lid}, restart it after the change; {rebind}")
        }
        (_, Some((other, active))) => {
            let name = port_name(other, active);
            evidence.push_str(&format!("; its physical function {name} is {}", active.state.as_str()));
            format!("bring {name} up first: the virtual function follows it")
        }
        (_, None) => format!(
            "on the host of the physical function: see that the virtual function has its GUIDs and the policy Follow (ip link show PF, /sys/class/infiniband/PF/device/sriov/N/policy); {virtualisation}; {rebind}"
        ),
    };
    let severity = down_severity(case, port);
    found.push(HostFinding::new(id::VF_DOWN, severity, port_name(device, port), evidence, remedy));
}

fn port_down(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let name = port_name(device, port);
    let states = describe_states(device, port);
    let severity = down_severity(case, port);
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
                format!("{}, or restart the driver; the switch port may be switched off too", port_command(device, port, "enable"))
            } else {
                "look at the cable, the transceiver (ethtool -m) and the switch port".to_owned()
            };
            found.push(HostFinding::new(id::PORT_DOWN, severity, name, states, others).with_changes(ups));
        }
    }
}

/// The command that changes the state of a port of this host. A port that is down has no LID, so the command names the device.
fn port_command(device: &RdmaDevice, port: &DevicePort, word: &str) -> String {
    if device.is_omni_path() {
        let word = if word == "reset" { "bounce" } else { word };
        return format!("opaportconfig -p {} {word}", port.number);
    }
    format!("ibportstate -C {} -P {} -D 0 {} {word}", device.name, port.number, port.number)
}

fn check_rate(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let Some(rate) = &port.rate else { return };
    let name = port_name(device, port);
    let path = port_path(device, port);
    let evidence = match &rate.interface {
        // The driver's own figure contradicts the interface.
        Some(interface) => format!("/sys/class/net/{interface}/speed is {}", (rate.gbps * 1000.0).round()),
        None => format!("{path}/rate is {}", rate.describe()),
    };
    let model = device.pci.as_ref().and_then(|p| p.model());
    // Ethernet has a single lane or four depending on the speed, and HDR100 splits a port in two: only a single lane is a fault.
    if port.link_layer == LinkLayer::InfiniBand && rate.lanes == 1 {
        found.push(HostFinding::new(
            id::LINK_WIDTH,
            Severity::Warning,
            &name,
            format!("{evidence}: one lane of four"),
            format!(
                "reseat or change the cable; dirty optics and bent pins cost lanes; then {}",
                port_command(device, port, "reset")
            ),
        ));
        return;
    }
    let siblings = case.all_ports().filter(|(d, p)| {
        d.pci.as_ref().and_then(|p| p.id_text()) == device.pci.as_ref().and_then(|p| p.id_text())
            && p.state == PortState::Active
            && p.link_layer == port.link_layer
    });
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
        return;
    }
    let Some(model) = model else { return };
    let planes = device.count_planes();
    let most = f64::from(model.most_gbps) / planes as f64;
    if most > rate.gbps * 1.01 {
        let slow = rate.gbps * 2.0 < most * 0.99;
        let in_planes = if planes > 1 { format!(" in {planes} planes") } else { String::new() };
        found.push(HostFinding::new(
            id::LINK_RATE,
            if slow { Severity::Warning } else { Severity::Info },
            name,
            format!("{evidence}; the fastest {} does {} Gb/s{in_planes}", model.name, model.most_gbps),
            "normal when the card's variant (board_id), the cable or the switch does no more; otherwise look at the cable, and at the speed set on the switch port",
        ));
    }
}

fn check_layer(case: &CheckInput<'_>, device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let is_other = case.options.expect.is_some_and(|wanted| wanted != port.link_layer);
    if port.link_layer == LinkLayer::Unknown && !is_other {
        return;
    }
    let name = port_name(device, port);
    let path = port_path(device, port);
    let number = if port.link_layer == LinkLayer::InfiniBand { 2 } else { 1 };
    let address = device.pci.as_ref().and_then(|p| p.address.clone()).unwrap_or_else(|| "PCI-ADDRESS".into());
    let is_vpi = device.pci.as_ref().is_some_and(|p| p.vendor == Some(VPI_VENDOR));
    let vpi_remedy = format!(
        "a VPI card changes it: mlxconfig -d {address} set LINK_TYPE_P{}={number}, then restart the host (mstconfig of the package mstflint does the same); ConnectX-3: echo {} > /sys/bus/pci/devices/{address}/mlx4_port{}",
        port.number.max(1),
        if number == 2 { "eth" } else { "ib" },
        port.number
    );
    let remedy = if is_vpi { vpi_remedy } else { "this card has no other link layer: name another port".to_owned() };
    let evidence = format!("{path}/link_layer is {}", layer_word(port.link_layer));
    if let Some(wanted) = case.options.expect.filter(|_| is_other) {
        let evidence = format!("{evidence}, but --expect requires {}", layer_word(wanted));
        found.push(HostFinding::new(id::LINK_LAYER, Severity::Error, name, evidence, remedy));
        return;
    }
    // An interface named ib0 on Ethernet, or the reverse, suggests a wrong link layer.
    for netdev in &port.netdevs {
        let Some(interface) = case.host.interface(netdev) else { continue };
        let named_ib = netdev.starts_with("ib");
        let is_ib = port.link_layer == LinkLayer::InfiniBand;
        if named_ib != is_ib && (named_ib || netdev.starts_with("eth")) && interface.master.is_none() && is_vpi {
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
    // Two ports of a card with different link layers: valid, but often unintended.
    let other = case.all_ports().find(|(d, p)| {
        slot_of(device).is_some()
            && slot_of(d) == slot_of(device)
            && p.link_layer != LinkLayer::Unknown
            && p.link_layer != port.link_layer
    });
    if let Some((d, p)) = other.filter(|_| port.link_layer == LinkLayer::Ethernet) {
        found.push(HostFinding::new(
            id::LINK_LAYER,
            Severity::Info,
            name,
            format!("{evidence}, and {} of the same card is {}", port_name(d, p), layer_word(p.link_layer)),
            remedy,
        ));
    }
}

pub(super) fn layer_word(layer: LinkLayer) -> &'static str {
    match layer {
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "Ethernet",
        LinkLayer::Unknown => "neither InfiniBand nor Ethernet",
    }
}

fn slot_of(d: &RdmaDevice) -> Option<String> {
    d.pci.as_ref().and_then(|p| p.address.as_ref()?.rsplit_once('.').map(|(s, _)| s.to_owned()))
}

/// Counters with the same meaning in different drivers, except zeros.
struct CounterSum {
    sum: u64,
    /// The folders that have the counters, each with names and values.
    evidence: String,
    /// Counters that have reached the maximum.
    saturated: Vec<&'static str>,
}

impl CounterSum {
    fn of(device: &RdmaDevice, port: &DevicePort, names: &[&'static str]) -> Self {
        let path = port_path(device, port);
        let mut result = CounterSum { sum: 0, evidence: String::new(), saturated: Vec::new() };
        for folder in ["counters", "hw_counters"] {
            let mut words = Vec::new();
            for name in names.iter().filter(|name| port.hw_counters.contains(**name) == (folder == "hw_counters")) {
                let Some(value) = port.counters.get(*name) else { continue };
                result.sum = result.sum.saturating_add(*value);
                let end = if port.is_saturated(name) { " (its end)" } else { "" };
                words.push(format!("{name} {value}{end}"));
                if port.is_saturated(name) {
                    result.saturated.push(name);
                }
            }
            if !words.is_empty() {
                let separator = if result.evidence.is_empty() { "" } else { "; " };
                result.evidence.push_str(&format!("{separator}{path}/{folder}: {}", words.join(", ")));
            }
        }
        result
    }

    /// A warning for many events, and where a counter at the maximum hides the number of events.
    fn severity(&self, many: u64) -> Severity {
        if self.sum > many || !self.saturated.is_empty() { Severity::Warning } else { Severity::Info }
    }

    /// The remedy, after the reset that a counter at the maximum needs.
    fn remedy(&self, device: &RdmaDevice, port: &DevicePort, remedy: &str) -> String {
        if self.saturated.is_empty() {
            return remedy.to_owned();
        }
        format!(
            "at its end a counter ({}) grows no further and says nothing about new events: set the counters to zero ({}) and look again after a minute; {remedy}",
            self.saturated.join(", "),
            clear_command(device, port)
        )
    }
}

/// The command that sets a port's counters to zero.
fn clear_command(device: &RdmaDevice, port: &DevicePort) -> String {
    if device.is_omni_path() {
        return "opapmaquery -o clearportstatus".to_owned();
    }
    format!("perfquery -R -C {} -P {}", device.name, port.number)
}

fn check_counters(device: &RdmaDevice, port: &DevicePort, found: &mut Vec<HostFinding>) {
    let name = port_name(device, port);
    let is_ib = port.link_layer == LinkLayer::InfiniBand;
    let errors = CounterSum::of(
        device,
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
    if errors.sum > 0 {
        let remedy = if errors.saturated.is_empty() && is_ib {
            format!(
                "counters are since the driver started: look again after a minute, and change the cable if they grow ({} sets them to zero)",
                clear_command(device, port)
            )
        } else if errors.saturated.is_empty() {
            "counters are since the driver started: look again after a minute, and change the cable if they grow"
                .to_owned()
        } else {
            errors.remedy(device, port, "change the cable if they grow again")
        };
        let severity = errors.severity(MANY_LINK_ERRORS);
        found.push(HostFinding::new(id::PORT_ERRORS, severity, &name, errors.evidence, remedy));
    }
    let lost = CounterSum::of(
        device,
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
    if lost.sum > 0 {
        let remedy = if device.is_omni_path() {
            "look for a bad link on the way: opareport -o errors"
        } else if is_ib {
            "look for a bad link on the way: ibqueryerrors"
        } else if device.is_iwarp() {
            "packets are lost on the way: equal MTUs on the way, cables, and switch ports that drop"
        } else {
            "packets are lost on the way: PFC or ECN on host and switch (ROCE-FLOW-CONTROL), equal MTUs on the way, and cables"
        };
        let remedy = lost.remedy(device, port, remedy);
        let severity = lost.severity(MANY_LOST_PACKETS);
        found.push(HostFinding::new(id::RETRANSMISSIONS, severity, &name, lost.evidence, remedy));
    }
    let marks = CounterSum::of(
        device,
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
    if marks.sum > 0 {
        found.push(HostFinding::new(
            id::CONGESTION,
            Severity::Info,
            name,
            marks.evidence,
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
