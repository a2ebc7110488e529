//! What the doctor finds on made-up hosts: the right ids, no others where a host is well, and a page for each id.

use proptest::prelude::*;
use spurline_fabric::{
    DoctorOptions, HostChange, HostFacts, HostFinding, HostTree, IpoibMode, LinkLayer, Severity, SmAnswer, TreeEntry,
    examine, finding,
};
use spurline_testkit::hosts;
use spurline_testkit::hosts::{Card, Made, Net};
use std::collections::{BTreeMap, BTreeSet};

fn found(made: &Made) -> Vec<HostFinding> {
    asked(made, &DoctorOptions::default())
}

fn asked(made: &Made, ask: &DoctorOptions) -> Vec<HostFinding> {
    examine(&HostTree::from_memory(made.entries(TreeEntry::File, TreeEntry::Link)), ask)
}

fn ids(found: &[HostFinding], severity: Severity) -> BTreeSet<&str> {
    found.iter().filter(|f| f.severity == severity).map(|f| f.id).collect()
}

/// The finding with that id about that subject.
fn one<'a>(found: &'a [HostFinding], id: &str, subject: &str) -> &'a HostFinding {
    let all: Vec<String> = found.iter().map(|f| format!("{} {}", f.id, f.subject)).collect();
    found
        .iter()
        .find(|f| f.id == id && f.subject.contains(subject))
        .unwrap_or_else(|| panic!("{id} {subject}: {all:?}"))
}

fn for_rdma(names: &[&str]) -> DoctorOptions {
    DoctorOptions { for_rdma: names.iter().map(|n| (*n).to_owned()).collect(), ..DoctorOptions::default() }
}

/// The one file whose path has this suffix.
fn file(made: &Made, end: &str) -> String {
    made.files.keys().find(|p| p.ends_with(end)).unwrap().clone()
}

/// A path inside a card's device.
fn port(pci: &str, device: &str, file: &str) -> String {
    format!("sys/devices/pci{}/{pci}/infiniband/{device}/ports/1/{file}", &pci[..7])
}

#[test]
fn hosts_that_are_well_have_no_errors() {
    for (name, made) in hosts::all() {
        let found = found(&made);
        let errors = ids(&found, Severity::Error);
        let expected: BTreeSet<&str> = if name == "no_sm" { ["NO-SUBNET-MANAGER"].into() } else { BTreeSet::new() };
        assert_eq!(errors, expected, "{name}");
        let warnings = ids(&found, Severity::Warning);
        let expected: &[&str] = match name {
            "vpi_ethernet" => &["MTU-LOW"],
            "cloud_ipoib" => &["IPOIB-MTU-REFUSED"],
            "mt25208" | "no_sm" => &["IPOIB-MODE", "PORT-POLLING"],
            _ => &[],
        };
        assert_eq!(warnings, expected.iter().copied().collect(), "{name}");
    }
}

#[test]
fn a_port_that_polls_and_a_fabric_without_a_manager() {
    let found = found(&hosts::no_sm());
    let polling = one(&found, "PORT-POLLING", "mthca0/2");
    assert!(polling.evidence.contains("/sys/class/infiniband/mthca0/ports/2/state is DOWN"), "{}", polling.evidence);
    let silent = one(&found, "NO-SUBNET-MANAGER", "mthca0/1");
    assert!(silent.remedy.contains("opensm") && silent.evidence.contains("sm_lid is 0x0"));
    // A RoCE port has no subnet manager, and none is missing.
    let mut roce = hosts::roce_jumbo();
    roce.put(&port("0000:41:00.0", "mlx5_0", "state"), "1: DOWN")
        .put(&port("0000:41:00.0", "mlx5_0", "phys_state"), "3: Disabled");
    let down = self::found(&roce);
    assert_eq!(one(&down, "PORT-DOWN", "mlx5_0/1").severity, Severity::Error, "its interface has an address");
    assert!(!down.iter().any(|f| f.id == "NO-SUBNET-MANAGER"));
}

#[test]
fn a_subnet_manager_that_is_gone() {
    let answers = |answer: SmAnswer| DoctorOptions {
        subnet_manager: BTreeMap::from([(("mlx5_ib0".to_owned(), 1), answer)]),
        ..DoctorOptions::default()
    };
    let made = hosts::cloud_ipoib();
    let gone = asked(&made, &answers(SmAnswer::Silent("timed out".into())));
    assert!(one(&gone, "SM-SILENT", "mlx5_ib0/1").evidence.contains("sm_lid is 0x1"));
    let not_asked = asked(&made, &answers(SmAnswer::QueryFailed("no libibumad.so.3".into())));
    assert!(one(&not_asked, "CHECK-LEFT-OUT", "subnet manager").evidence.contains("libibumad"));
    assert!(!asked(&made, &answers(SmAnswer::Alive)).iter().any(|f| f.id == "SM-SILENT"));
}

#[test]
fn ipoib_modes_promise_only_what_the_card_can() {
    let old = found(&hosts::mt25208());
    let mode = one(&old, "IPOIB-MODE", "ib0");
    let to = HostChange::Mode { interface: "ib0".into(), from: Some(IpoibMode::Datagram), to: IpoibMode::Connected };
    assert_eq!(mode.changes[0], to);
    assert!(mode.remedy.starts_with("echo connected > /sys/class/net/ib0/mode && ip link set ib0 mtu 65520"));
    let cloud = found(&hosts::cloud_ipoib());
    let mode = one(&cloud, "IPOIB-MODE", "ib0");
    assert!(mode.severity == Severity::Info && mode.changes.is_empty() && !mode.remedy.contains("connected"));
    let refused = one(&cloud, "IPOIB-MTU-REFUSED", "ib0");
    assert!(refused.evidence.contains("Invalid argument") && refused.evidence.contains("2044"));
    let mut connected = hosts::mt25208();
    let mode = file(&connected, "net/ib0/mode");
    connected.put(&mode, "connected");
    let low = found(&connected);
    assert!(one(&low, "MTU-LOW", "ib0").remedy.starts_with("ip link set ib0 mtu 65520"));
    // What was set by hand is gone after a restart when a system of configuration is there and says nothing.
    connected.put("etc/network/interfaces", "auto lo\niface lo inet loopback");
    let lost = found(&connected);
    let lost = one(&lost, "NOT-PERSISTED", "ib0");
    assert!(
        lost.evidence.contains("address 10.0.0.1/24") && lost.evidence.contains("mode connected"),
        "{}",
        lost.evidence
    );
}

#[test]
fn link_rate_width_layer_and_counters() {
    let mut made = hosts::gb200();
    made.put(&port("0002:03:00.0", "mlx5_1", "rate"), "200 Gb/sec (2X NDR)");
    made.put(&port("0010:03:00.0", "mlx5_4", "rate"), "100 Gb/sec (1X NDR)");
    made.put(&port("0000:03:00.0", "mlx5_0", "counters/symbol_error"), "8734");
    made.put(&port("0000:03:00.0", "mlx5_0", "hw_counters/packet_seq_err"), "5000");
    made.put(&port("0006:03:00.0", "mlx5_bond_0", "hw_counters/np_cnp_sent"), "12");
    let fw = file(&made, "mlx5_5/fw_ver");
    made.put(&fw, "28.39.1002");
    let found = found(&made);
    assert!(one(&found, "LINK-RATE", "mlx5_1/1").evidence.contains("the same card, runs 400 Gb/s"));
    one(&found, "LINK-WIDTH", "mlx5_4/1");
    assert!(one(&found, "PORT-ERRORS", "mlx5_0/1").evidence.contains("symbol_error 8734"));
    one(&found, "RETRANSMISSIONS", "mlx5_0/1");
    one(&found, "CONGESTION", "mlx5_bond_0/1");
    one(&found, "FIRMWARE-MIXED", "mlx5_5");
    let meant =
        asked(&hosts::roce_jumbo(), &DoctorOptions { expect: Some(LinkLayer::InfiniBand), ..DoctorOptions::default() });
    assert_eq!(one(&meant, "LINK-LAYER", "mlx5_0/1").severity, Severity::Error);
    assert!(
        one(&meant, "LINK-LAYER", "mlx5_0/1").remedy.contains("LINK_TYPE_P1=2")
            || meant.iter().any(|f| f.remedy.contains("LINK_TYPE_P1=1"))
    );
    let both = self::found(&hosts::vpi_ethernet());
    assert_eq!(one(&both, "LINK-LAYER", "mlx5_1/1").severity, Severity::Info);
}

#[test]
fn two_interfaces_in_one_subnet() {
    let mut made = hosts::gb200();
    made.addresses(&[("ibp3s0", "10.10.0.1", 24), ("ibP2p3s0", "10.10.0.2", 24), ("bond0", "10.20.0.1", 24)]);
    made.put("proc/sys/net/ipv4/conf/ibp3s0/rp_filter", "1").put("proc/sys/net/ipv4/conf/ibP2p3s0/rp_filter", "2");
    made.put("proc/sys/net/ipv4/conf/ibp3s0/arp_ignore", "0").put("proc/sys/net/ipv4/conf/ibP2p3s0/arp_ignore", "1");
    let found = found(&made);
    let same = one(&found, "SAME-SUBNET", "ibp3s0");
    assert!(
        same.evidence.contains("10.10.0.0/24") && same.subject.contains("ibP2p3s0") && same.remedy.contains("bond")
    );
    let flux = one(&found, "ARP-FLUX", "ibp3s0");
    assert!(flux.remedy.contains("sysctl -w net.ipv4.conf.ibp3s0.arp_ignore=1"), "{}", flux.remedy);
    let filter = one(&found, "RP-FILTER", "ibp3s0");
    assert_eq!(filter.changes.len(), 1, "the other is loose already");
    one(&found, "NO-ADDRESS", "ibP16p3s0");
    let errors = asked(&made, &for_rdma(&["ibp3s0", "ibP16p3s0"]));
    assert!(ids(&errors, Severity::Error).is_superset(&["SAME-SUBNET", "NO-ADDRESS"].into()));
}

#[test]
fn bonds_and_roce_addresses() {
    let mut made = hosts::gb200();
    let bond = "sys/devices/virtual/net/bond0/bonding/mode";
    made.put(bond, "balance-rr 0");
    let member = file(&made, "enP6p3s0f1np1/carrier");
    made.put(&member, "0");
    let gids = port("0016:03:00.0", "mlx5_bond_1", "gid_attrs/types/");
    made.put(&format!("{gids}1"), "IB/RoCE v1").put(&format!("{gids}3"), "IB/RoCE v1");
    let found = found(&made);
    one(&found, "BOND-MODE", "bond0");
    one(&found, "BOND-MEMBER", "enP6p3s0f1np1");
    one(&found, "GID-ROCE-V2", "mlx5_bond_1/1");
    // IPoIB can be bonded in one mode only.
    let mut ipoib = hosts::mt25208();
    ipoib.net(None, &Net { name: "bond0", kind: 32, mtu: 2044, operstate: "up", speed: -1, mode: "", dev_port: 0 });
    ipoib.put("sys/devices/virtual/net/bond0/bonding/mode", "802.3ad 4");
    assert_eq!(one(&self::found(&ipoib), "BOND-MODE", "bond0").severity, Severity::Error);
    let mut local = hosts::roce_jumbo();
    for n in 2..4 {
        local.put(&port("0000:41:00.0", "mlx5_0", &format!("gids/{n}")), "0000:0000:0000:0000:0000:0000:0000:0000");
    }
    assert!(one(&self::found(&local), "GID-ROCE-V2", "mlx5_0/1").evidence.contains("link-local"));
    let mut tuned = hosts::roce_jumbo();
    tuned.put("netlink.json", r#"{"pfc":[{"interface":"ens1f0np0","priorities":0}]}"#);
    tuned.put("sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos", "0");
    let tuned = self::found(&tuned);
    one(&tuned, "ROCE-FLOW-CONTROL", "mlx5_0/1");
    one(&tuned, "ROCE-TRAFFIC-CLASS", "mlx5_0/1");
}

#[test]
fn software_between_card_and_program() {
    let mut bare = hosts::mt25208();
    bare.remove("sys/class/infiniband").remove("sys/module/ib_mthca").remove("usr/lib/x86_64-linux-gnu/libib");
    bare.put("proc/modules", "ib_core 1 0 - Live 0x0");
    let missing = found(&bare);
    let driver = one(&missing, "DRIVER-MISSING", "0000:05:00.0");
    assert!(driver.severity == Severity::Error && driver.remedy.starts_with("modprobe ib_mthca"), "{driver:?}");

    let mut stack = hosts::roce_jumbo();
    stack.remove("usr/lib/x86_64-linux-gnu/lib").put("usr/lib/x86_64-linux-gnu/libc.so.6", "");
    stack
        .remove("dev/infiniband/rdma_cm")
        .remove("sys/module/rdma_ucm")
        .put("proc/modules", "ib_uverbs 1 0 - Live 0x0");
    stack.put("netlink.json", r#"{"rdma_exclusive":true}"#);
    let stack = asked(&stack, &for_rdma(&["ens1f0np0", "ens9"]));
    assert!(one(&stack, "RDMA-LIBRARY", "libibverbs.so.1").remedy.contains("apt-get install"));
    assert!(one(&stack, "KERNEL-MODULE", "rdma_ucm").remedy.starts_with("modprobe rdma_ucm"));
    assert!(one(&stack, "NO-RDMA-DEVICE", "ens9").remedy.contains("ens1f0np0"));
    one(&stack, "RDMA-NAMESPACE", "mode");

    let mut gone = hosts::roce_jumbo();
    gone.remove("dev/infiniband").put("dev/null", "");
    one(&found(&gone), "UVERBS-ACCESS", "/dev/infiniband");
    gone.put(".dockerenv", "").put("proc/self/status", "CapEff:\t00000000a80425fb");
    let limits = "Max open files            1024                 4096                 files\nMax locked memory         8388608              8388608              bytes";
    gone.put("proc/self/limits", limits);
    let inside = found(&gone);
    one(&inside, "CONTAINER-DEVICES", "container");
    one(&inside, "CONTAINER-IPC-LOCK", "container");
    one(&inside, "OPEN-FILES", "shell");
    assert!(one(&inside, "MEMLOCK-LIMIT", "shell").evidence.contains("8192 KiB"));
    let mut vf = hosts::cloud_ipoib();
    let guid = file(&vf, "mlx5_ib0/node_guid");
    vf.put(&guid, "0000:0000:0000:0000");
    one(&found(&vf), "GUID-ZERO", "mlx5_ib0");
    one(&found(&hosts::efa()), "NO-RELIABLE-CONNECTION", "rdmap0s27");
    one(&found(&hosts::soft_roce()), "SOFT-RDMA", "rxe0");
    one(&found(&hosts::plain()), "NO-RDMA-DEVICE", "plain-01");
}

#[test]
fn a_standby_of_a_bond_over_two_cards_lacks_nothing() {
    let made = hosts::bond_of_two_cards();
    let lacks = |made: &Made| -> Vec<String> {
        let all = asked(made, &for_rdma(&["bond0"]));
        all.into_iter().filter(|f| f.severity == Severity::Error).map(|f| format!("{} {}", f.id, f.subject)).collect()
    };
    assert!(lacks(&made).is_empty(), "{:?}", lacks(&made));
    let mut empty = made.clone();
    empty.remove(&port("0000:3b:00.0", "mlx5_3", "gid"));
    assert!(lacks(&empty).is_empty(), "{:?}", lacks(&empty));
    // The active member has to have the addresses.
    empty.put("sys/devices/virtual/net/bond0/bonding/active_slave", "ens2f0");
    assert_eq!(lacks(&empty), ["GID-ROCE-V2 mlx5_3/1"]);
}

#[test]
fn the_planes_of_a_card_share_its_rate_and_its_other_ports_are_unused() {
    let made = hosts::planes();
    let at = "sys/devices/pci0000:03/0000:03:00.0/infiniband/mlx5_0/ports";
    let is_about_ports = |f: &HostFinding| f.id.starts_with("PORT") || f.id.starts_with("LINK");
    assert!(!found(&made).iter().any(is_about_ports), "{:?}", found(&made));
    let mut slow = made.clone();
    slow.put(&format!("{at}/6/rate"), "100 Gb/sec (1X NDR)");
    let speed = file(&slow, "eth_p1/speed");
    slow.put(&speed, "100000");
    let slow = found(&slow);
    assert!(one(&slow, "LINK-RATE", "mlx5_0/6").evidence.contains("runs 200 Gb/s"), "{slow:?}");
    // A plane that is down has its interface, and its address.
    let mut down = made.clone();
    down.put(&format!("{at}/9/state"), "1: DOWN").put(&format!("{at}/9/phys_state"), "3: Disabled");
    let down: Vec<String> =
        found(&down).into_iter().filter(is_about_ports).map(|f| format!("{} {}", f.id, f.subject)).collect();
    assert_eq!(down, ["PORT-DOWN mlx5_0/9"]);
    // All planes with a half of the rate.
    let mut half = made;
    for (port, net) in [(3, "eth_p0"), (6, "eth_p1"), (9, "eth_p2"), (12, "eth_p3")] {
        half.put(&format!("{at}/{port}/rate"), "100 Gb/sec (1X NDR)");
        let speed = file(&half, &format!("{net}/speed"));
        half.put(&speed, "100000");
    }
    let half = found(&half);
    assert!(one(&half, "LINK-RATE", "mlx5_0/3").evidence.contains("does 800 Gb/s in 4 planes"), "{half:?}");
}

#[test]
fn a_virtual_function_that_is_used_on_its_host_has_findings() {
    let idle = hosts::roce_virtual_functions();
    let about = |made: &Made, ask: &DoctorOptions| -> BTreeSet<&'static str> {
        let is_function =
            |f: &HostFinding| ["mlx5_1", "mlx5_2", "ens1f0v", "41:00.4"].iter().any(|n| f.subject.contains(n));
        asked(made, ask).into_iter().filter(is_function).map(|f| f.id).collect()
    };
    assert_eq!(about(&idle, &DoctorOptions::default()), BTreeSet::new());
    let required = about(&idle, &for_rdma(&["ens1f0v0", "ens1f0v1"]));
    let wanted = ["GID-ROCE-V2", "MTU-LOW", "NO-ADDRESS", "PORT-DOWN"].into();
    assert!(required.is_superset(&wanted), "{required:?}");
    let mut used = idle;
    used.addresses(&[("ens1f0np0", "192.168.10.11", 24), ("ens1f0v1", "192.168.12.11", 24)]);
    assert!(about(&used, &DoctorOptions::default()).contains("PORT-DOWN"));
}

#[test]
fn an_expected_link_layer_that_no_port_has_is_an_error() {
    let expect = |layer| DoctorOptions { expect: Some(layer), ..DoctorOptions::default() };
    for (made, id, subject) in [
        (hosts::plain(), "NO-RDMA-DEVICE", "plain-01"),
        (hosts::efa(), "LINK-LAYER", "rdmap0s27/1"),
        (hosts::roce_jumbo(), "LINK-LAYER", "mlx5_0/1"),
    ] {
        let all = asked(&made, &expect(LinkLayer::InfiniBand));
        let missing = one(&all, id, subject);
        assert!(missing.severity == Severity::Error && missing.evidence.contains("requires InfiniBand"), "{missing:?}");
    }
    let right = asked(&hosts::xdr(), &expect(LinkLayer::InfiniBand));
    assert!(ids(&right, Severity::Error).is_empty(), "{right:?}");
}

#[test]
fn findings_about_collected_facts_name_their_host() {
    for (name, made) in hosts::all() {
        let host = HostFacts::read_from(&HostTree::from_memory(made.entries(TreeEntry::File, TreeEntry::Link)));
        for finding in found(&made) {
            let text = format!("{} {} {}", finding.subject, finding.evidence, finding.remedy);
            assert!(!text.contains("this host") && !text.contains("this shell"), "{name}: {text}");
        }
        assert!(host.hostname.is_some());
    }
}

#[test]
fn a_virtual_function_is_down_by_its_guid_its_policy_or_its_subnet_manager() {
    let down = |change: &dyn Fn(&mut Made)| {
        let mut made = hosts::ib_virtual_function();
        made.put(&port("0000:61:00.1", "mlx5_1", "state"), "1: DOWN");
        made.put(&port("0000:61:00.1", "mlx5_1", "phys_state"), "3: Disabled");
        made.put(&port("0000:61:00.1", "mlx5_1", "lid"), "0xffff")
            .put(&port("0000:61:00.1", "mlx5_1", "sm_lid"), "0x0");
        change(&mut made);
        let found = found(&made);
        for finding in &found {
            let remedy = &finding.remedy;
            assert!(!remedy.contains("install opensm") && !remedy.contains("ibportstate"), "{finding:?}");
        }
        found
    };
    let unmanaged = down(&|_| {});
    let cause = one(&unmanaged, "VF-DOWN", "mlx5_1/1");
    assert_eq!(cause.severity, Severity::Error, "its interface has an address");
    assert!(cause.evidence.contains("its physical function mlx5_0/1 is ACTIVE"), "{}", cause.evidence);
    assert!(cause.evidence.contains("policy is Follow") && cause.remedy.contains("virt_enabled 2"), "{cause:?}");
    let policy = down(&|made| {
        made.put("sys/devices/pci0000:61/0000:61:00.0/sriov/0/policy", "Down");
    });
    assert!(one(&policy, "VF-DOWN", "mlx5_1/1").remedy.starts_with("echo Follow > "), "{policy:?}");
    let parent = down(&|made| {
        made.put(&port("0000:61:00.0", "mlx5_0", "state"), "1: DOWN");
        made.put(&port("0000:61:00.0", "mlx5_0", "phys_state"), "2: Polling");
    });
    assert!(one(&parent, "VF-DOWN", "mlx5_1/1").remedy.contains("bring mlx5_0/1 up first"), "{parent:?}");
    let guest = down(&|made| {
        let physical = "sys/devices/pci0000:61/0000:61:00.0";
        made.remove(physical)
            .remove("sys/class/infiniband/mlx5_0")
            .remove("sys/devices/pci0000:61/0000:61:00.1/physfn");
    });
    assert!(one(&guest, "VF-DOWN", "mlx5_1/1").remedy.contains("policy Follow"), "{guest:?}");
    let unnamed = down(&|made| {
        let guid = file(made, "mlx5_1/node_guid");
        made.put(&guid, "0000:0000:0000:0000").put(&port("0000:61:00.1", "mlx5_1", "sm_lid"), "0x4");
        made.put(&port("0000:61:00.1", "mlx5_1", "state"), "2: INIT");
    });
    let cause = one(&unnamed, "GUID-ZERO", "mlx5_1");
    assert!(cause.severity == Severity::Error && cause.evidence.contains("state is INIT"), "{cause:?}");
    assert!(!unnamed.iter().any(|f| f.id == "VF-DOWN" || f.id == "NO-SUBNET-MANAGER"), "{unnamed:?}");
}

#[test]
fn only_infiniband_needs_guids() {
    for (mut made, device) in
        [(hosts::efa(), "rdmap0s27"), (hosts::on_board_iwarp(), "i40iw0"), (hosts::roce_jumbo(), "mlx5_0")]
    {
        let guid = file(&made, &format!("{device}/node_guid"));
        made.put(&guid, "0000:0000:0000:0000");
        assert!(!found(&made).iter().any(|f| f.id == "GUID-ZERO"), "{device}");
    }
}

#[test]
fn no_second_subnet_manager_beside_a_known_one() {
    let mut known = hosts::no_sm();
    known.put(&port("0000:05:00.0", "mthca0", "sm_lid"), "0x4");
    let known = found(&known);
    let cause = one(&known, "NO-SUBNET-MANAGER", "mthca0/1");
    assert!(cause.evidence.contains("sm_lid is 0x4: the subnet manager with that LID is known"), "{cause:?}");
    assert!(!cause.remedy.contains("install") && cause.remedy.contains("LID 4"), "{cause:?}");
    let mut beside = hosts::gb200();
    beside.put(&port("0002:03:00.0", "mlx5_1", "state"), "2: INIT").put(&port("0002:03:00.0", "mlx5_1", "sm_lid"), "0");
    let beside = found(&beside);
    let cause = one(&beside, "NO-SUBNET-MANAGER", "mlx5_1/1");
    assert!(cause.remedy.starts_with("if this port and mlx5_0/1 are cabled to one fabric"), "{cause:?}");
    // A port that is down has no LID to be named by.
    let mut disabled = hosts::gb200();
    disabled.put(&port("0002:03:00.0", "mlx5_1", "state"), "1: DOWN");
    disabled.put(&port("0002:03:00.0", "mlx5_1", "phys_state"), "3: Disabled");
    disabled.put(&port("0002:03:00.0", "mlx5_1", "lid"), "0xffff");
    let disabled = found(&disabled);
    assert!(one(&disabled, "PORT-DOWN", "mlx5_1/1").remedy.contains("ibportstate -C mlx5_1 -P 1 -D 0 1 enable"));
}

#[test]
fn omni_path_has_its_own_manager_tools_and_limits() {
    let accelerated = found(&hosts::omni_path());
    let mode = one(&accelerated, "IPOIB-MODE", "ibp94s0");
    assert!(mode.severity == Severity::Info && mode.evidence.contains("accelerated IPoIB"), "{mode:?}");
    let mut made = hosts::omni_path();
    let mtu = file(&made, "ibp94s0/mtu");
    made.put(&mtu, "2044");
    let small = found(&made);
    let mode = one(&small, "IPOIB-MODE", "ibp94s0");
    assert!(mode.evidence.contains("an MTU of up to 10236") && mode.remedy.contains("opafm.xml"), "{mode:?}");
    made.put("proc/sys/kernel/osrelease", "3.10.0-1160.el7.x86_64");
    let old = found(&made);
    let mode = one(&old, "IPOIB-MODE", "ibp94s0");
    assert!(mode.severity == Severity::Warning && mode.remedy.contains("echo connected >"), "{mode:?}");
    made.put(&port("0000:5e:00.0", "hfi1_0", "state"), "2: INIT").put(&port("0000:5e:00.0", "hfi1_0", "sm_lid"), "0x0");
    made.put(&port("0000:5e:00.0", "hfi1_0", "counters/link_downed"), "255");
    let unmanaged = found(&made);
    let manager = one(&unmanaged, "NO-SUBNET-MANAGER", "hfi1_0/1");
    assert!(manager.evidence.contains("no fabric manager") && manager.remedy.contains("opafm"), "{manager:?}");
    assert!(one(&unmanaged, "PORT-ERRORS", "hfi1_0/1").remedy.contains("opapmaquery"));
}

#[test]
fn counters_at_their_end_can_not_grow_and_evidence_names_their_folder() {
    let mut made = hosts::gb200();
    let counter = |name: &str| port("0000:03:00.0", "mlx5_0", name);
    made.put(&counter("counters/link_downed"), "255").put(&counter("counters/excessive_buffer_overrun_errors"), "15");
    made.put(&counter("counters/port_xmit_discards"), "65535").put(&counter("hw_counters/out_of_sequence"), "3");
    let found = found(&made);
    let errors = one(&found, "PORT-ERRORS", "mlx5_0/1");
    assert!(
        errors.severity == Severity::Warning && errors.evidence.contains("link_downed 255 (its end)"),
        "{errors:?}"
    );
    assert!(errors.remedy.contains("grows no further") && errors.remedy.contains("perfquery -R -C mlx5_0 -P 1"));
    let lost = &one(&found, "RETRANSMISSIONS", "mlx5_0/1").evidence;
    let at = "/sys/class/infiniband/mlx5_0/ports/1";
    let wanted = format!("{at}/counters: port_xmit_discards 65535 (its end); {at}/hw_counters: out_of_sequence 3");
    assert_eq!(*lost, wanted);
}

#[test]
fn rates_and_links_that_are_none_are_not_judged() {
    let iwarp = found(&hosts::on_board_iwarp());
    assert!(!iwarp.iter().any(|f| f.id.starts_with("PCIE") || f.id == "LINK-RATE"), "{iwarp:?}");
    let mut slow = hosts::on_board_iwarp();
    let speed = file(&slow, "eno1/speed");
    slow.put(&speed, "1000");
    let slow = found(&slow);
    assert!(one(&slow, "LINK-RATE", "i40iw0/1").evidence.starts_with("/sys/class/net/eno1/speed is 1000;"));
    for max_width in ["16", "4"] {
        let mut made = hosts::gb10();
        for pci in ["0000:01:00.0", "0002:01:00.0"] {
            made.put(&format!("sys/devices/pci{}/{pci}/max_link_width", &pci[..7]), max_width);
        }
        let pair = found(&made);
        let link = one(&pair, "PCIE-BANDWIDTH", "rocep1s0f0");
        assert!(link.severity == Severity::Info && link.evidence.contains("roceP2p1s0f0 (0002:01:00.0)"), "{link:?}");
        assert!(link.remedy.contains("enp1s0f0np0, enP2p1s0f0np0"), "{link:?}");
        assert!(!pair.iter().any(|f| f.id == "PCIE-WIDTH"), "{pair:?}");
    }
}

#[test]
fn missing_device_files_and_folders_without_files() {
    let mut some = hosts::gb200();
    some.remove("dev/infiniband/uverbs1").remove("dev/infiniband/uverbs3");
    let host = found(&some);
    let missing = one(&host, "UVERBS-ACCESS", "/dev/infiniband");
    let evidence = "2 of 6 devices have no file in /dev/infiniband: mlx5_1 (uverbs1), mlx5_5 (uverbs3)";
    assert_eq!((missing.severity, missing.evidence.as_str()), (Severity::Warning, evidence));
    assert_eq!(one(&asked(&some, &for_rdma(&["ibP2p3s0"])), "UVERBS-ACCESS", "/dev").severity, Severity::Error);
    some.put(".dockerenv", "");
    assert_eq!(one(&found(&some), "CONTAINER-DEVICES", "container").severity, Severity::Info);
    let mut bare = hosts::roce_jumbo();
    bare.remove("sys/devices/pci0000:41/0000:41:00.0/infiniband");
    bare.put("sys/devices/pci0000:41/0000:41:00.0/infiniband/mlx5_0/power/control", "on");
    let bare = found(&bare);
    assert!(one(&bare, "CHECK-LEFT-OUT", "mlx5_0").evidence.contains("neither its type nor its ports"), "{bare:?}");
}

#[test]
fn limits_and_placement() {
    let mut made = hosts::roce_jumbo();
    made.put("etc/systemd/system/slurmd.service", "[Service]\nExecStart=/usr/sbin/slurmd\nEnvironment=KEY=secret");
    made.put("etc/systemd/system/containerd.service", "[Service]\nLimitMEMLOCK=infinity");
    made.put("etc/systemd/system/docker.service", "[Service]\nLimitMEMLOCK=8M");
    made.put("proc/meminfo", "HugePages_Total:       0\nHugepagesize:       2048 kB");
    made.put("sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "powersave");
    made.put("sys/class/nvme/nvme0/numa_node", "0");
    let card = Card {
        pci: "0000:01:00.0",
        ids: (0x10de, 0x2330),
        class: "0x030200",
        driver: "nvidia",
        numa: 0,
        link: hosts::GEN5,
    };
    made.card(&card);
    let at = "sys/bus/pci/devices/0000:41:00.0";
    let real = made
        .files
        .keys()
        .find_map(|p| p.strip_suffix("0000:41:00.0/vendor"))
        .map(|p| format!("{p}0000:41:00.0"))
        .unwrap();
    assert!(made.links.contains_key(at));
    made.put(&format!("{real}/current_link_width"), "8").put(&format!("{real}/current_link_speed"), "8.0 GT/s PCIe");
    made.put(&format!("{real}/iommu_group/type"), "DMA-FQ");
    let mut config = vec![0u8; 256];
    (config[0x34], config[0x40]) = (0x40, 0x10);
    made.files.insert(format!("{real}/config"), config.clone());
    let found = found(&made);
    one(&found, "MEMLOCK-SYSTEMD", "slurmd.service");
    assert!(one(&found, "MEMLOCK-CONTAINER", "docker.service").evidence.contains("LimitMEMLOCK=8M"));
    assert!(!found.iter().any(|f| f.subject == "containerd.service"));
    for (id, subject) in [
        ("HUGE-PAGES", "roce-01"),
        ("CPU-GOVERNOR", "processors"),
        ("PCIE-WIDTH", "mlx5_0"),
        ("PCIE-SPEED", "mlx5_0"),
        ("PCIE-BANDWIDTH", "mlx5_0"),
        ("IOMMU", "mlx5_0"),
        ("RELAXED-ORDERING", "mlx5_0"),
        ("NUMA-DISTANCE", "nvme0"),
        ("NUMA-DISTANCE", "0000:01:00.0"),
    ] {
        one(&found, id, subject);
    }
    config.truncate(64);
    made.files.insert(format!("{real}/config"), config);
    assert!(one(&self::found(&made), "CHECK-LEFT-OUT", "relaxed ordering").remedy.contains("root"));
    // What a unit or a command line holds besides is not collected.
    let tree = HostTree::from_memory(made.entries(TreeEntry::File, TreeEntry::Link)).with_recording();
    let kept = spurline_fabric::collect_facts(&tree, |tree| drop(examine(tree, &DoctorOptions::default())));
    let unit = &kept["etc/systemd/system/slurmd.service"];
    assert!(matches!(unit, TreeEntry::File(text) if !String::from_utf8_lossy(text).contains("secret")), "{unit:?}");
}

#[test]
fn two_ends_compared() {
    let mut peer = hosts::roce_jumbo();
    peer.put("proc/sys/kernel/hostname", "roce-02").addresses(&[("ens1f0np0", "192.168.10.12", 24)]);
    let mtu = file(&peer, "ens1f0np0/mtu");
    peer.put(&mtu, "1500");
    let with = |made: &Made| DoctorOptions {
        peer: Some(HostFacts::read_from(&HostTree::from_memory(made.entries(TreeEntry::File, TreeEntry::Link)))),
        ..DoctorOptions::default()
    };
    let here = hosts::roce_jumbo();
    let differ = asked(&here, &with(&peer));
    let mtu = one(&differ, "PEER-MTU", "ens1f0np0");
    assert!(mtu.evidence.contains("roce-02 has 1500") && mtu.changes.is_empty() && mtu.remedy.contains("on roce-02"));
    // From the smaller end there is something to change here.
    let other = asked(&peer, &with(&here));
    assert_eq!(one(&other, "PEER-MTU", "ens1f0np0").changes.len(), 1);
    let stranger = asked(&here, &with(&hosts::mt25208()));
    one(&stranger, "PEER-SUBNET", "old-01");
    one(&stranger, "PEER-LINK-LAYER", "old-01");
    let mut ib = hosts::cloud_ipoib();
    ib.addresses(&[("ib0", "192.168.10.77", 24)]);
    one(&asked(&here, &with(&ib)), "PEER-LINK-LAYER", "ens1f0np0");
    // The route into the subnet leads over another interface.
    let mut astray = hosts::roce_jumbo();
    let json = r#"{"addresses":[{"interface":"ens1f0np0","ip":"192.168.10.11","prefix":24}],
        "routes":[{"to":"192.168.10.0","prefix":24,"interface":"eth0","via":null}]}"#;
    astray.put("netlink.json", json);
    assert!(one(&asked(&astray, &with(&peer)), "PEER-ROUTE", "ens1f0np0").evidence.contains("leave by eth0"));
}

#[test]
fn pipes_for_splice() {
    let with = |limit: &str| {
        let mut made = hosts::roce_jumbo();
        made.put("proc/sys/fs/pipe-max-size", limit);
        found(&made)
    };
    assert!(!with("8388608").iter().any(|f| f.id == "PIPE-MAX-SIZE"));
    let usual = with("1048576");
    let usual = one(&usual, "PIPE-MAX-SIZE", "roce-01");
    assert!(usual.severity == Severity::Info && usual.evidence.contains("JuiceFS needs 8388608"), "{usual:?}");
    assert!(usual.remedy.starts_with("nothing for Spurline"), "{usual:?}");
    let tiny = with("4096");
    let tiny = one(&tiny, "PIPE-MAX-SIZE", "roce-01");
    assert!(
        tiny.severity == Severity::Warning && tiny.remedy.starts_with("sysctl -w fs.pipe-max-size=8388608"),
        "{tiny:?}"
    );
}

#[test]
fn pages_and_json() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/findings");
    let files: BTreeSet<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let known: BTreeSet<String> = finding::PAGES.iter().map(|(id, _)| format!("{id}.md")).collect();
    assert_eq!(files, known, "one page for each id, and one id for each page");
    for (id, page) in finding::PAGES {
        assert!(page.starts_with(&format!("# {id}: ")), "{id}");
        assert!(page.contains("## Seen in") && page.contains("## What to do") && page.len() > 200, "{id}");
    }
    assert!(finding::page_of("ipoib-mode").is_some() && finding::page_of("x").is_none());
    let json = serde_json::to_value(&found(&hosts::no_sm())[0]).unwrap();
    let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["doc", "evidence", "id", "remedy", "severity", "subject"]);
    assert_eq!((&json["severity"], &json["doc"]), (&"error".into(), &"docs/findings/NO-SUBNET-MANAGER.md".into()));
}

#[test]
fn every_id_is_raised_somewhere() {
    // Searches the sources for ids that are no longer used but still have a page.
    let src = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut text = std::fs::read_to_string(src.join("doctor.rs")).unwrap();
    // Findings about pods are raised above this crate.
    for dir in [src.join("check"), src.join("../../../kube/devices/src")] {
        for file in std::fs::read_dir(dir).unwrap() {
            text.push_str(&std::fs::read_to_string(file.unwrap().path()).unwrap());
        }
    }
    for (id, _) in finding::PAGES {
        assert!(text.contains(&format!("id::{}", id.replace('-', "_"))), "{id} is raised nowhere");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn half_broken_trees_are_no_panic(
        host in 0usize..20,
        wreck in proptest::collection::vec((any::<u32>(), 0u8..7, proptest::collection::vec(any::<u8>(), 0..40)), 1..60),
    ) {
        let all = hosts::all();
        let mut broken = all[host % all.len()].1.entries(TreeEntry::File, TreeEntry::Link);
        for (at, how, junk) in wreck {
            let Some(path) = broken.keys().nth(at as usize % broken.len().max(1)).cloned() else { continue };
            let entry = match how {
                0 => { broken.remove(&path); continue }
                1 => TreeEntry::File(Vec::new()),
                2 => TreeEntry::File(junk),
                3 => TreeEntry::Link(path.clone()),
                4 => TreeEntry::Link(String::from_utf8_lossy(&junk).into_owned()),
                5 => TreeEntry::File(b"99999999999999999999999999 Gb/sec (99999999999X ZDR)".to_vec()),
                _ => TreeEntry::File(b"-1".to_vec()),
            };
            broken.insert(path, entry);
        }
        let peer = HostFacts::read_from(&HostTree::from_memory(broken.clone()));
        let names = peer.interfaces.iter().map(|i| i.name.clone()).take(2).collect();
        let ask = DoctorOptions { for_rdma: names, peer: Some(peer), ..DoctorOptions::default() };
        for f in examine(&HostTree::from_memory(broken), &ask) {
            prop_assert!(finding::page_of(f.id).is_some() && !f.evidence.is_empty());
        }
    }
}
