//! Every sentence, from figures made up.

use super::*;
use crate::drive::{RunProgress, RunResult};
use crate::measure::RailOutcome;
use crate::message::ProbeOp;
use crate::message::{ProbePlan, ServerReport};

fn port(interface: &str, gigabits: u64) -> InterfaceLink {
    InterfaceLink {
        interface: interface.into(),
        address: "10.0.0.1".into(),
        medium: LinkMedium::Ethernet,
        rate_bits: Some(gigabits * 1_000_000_000),
        mtu: Some(9000),
        ..InterfaceLink::default()
    }
}

/// Ten seconds of reading at this many Gb/s, between ports of `port` Gb/s, four streams.
fn outcome(gigabits: f64, of_port: u64) -> ProbeOutcome {
    let elapsed = Duration::from_secs(10);
    let bytes = (gigabits * 1e9 / 8.0 * 10.0) as u64;
    let total = RunProgress { elapsed, read_bytes: bytes, write_bytes: 0, ops: bytes >> 20 };
    ProbeOutcome {
        rails: Vec::new(),
        plan: ProbePlan { streams: vec![ProbeOp::Read; 4], ..ProbePlan::default() },
        measured: RunResult {
            stream_bytes: Vec::new(),
            elapsed,
            total,
            seconds: vec![],
            moved_bytes: bytes,
            times: vec![],
            cpu_seconds: 4.0,
            busiest_seconds: 1.0,
            wall_seconds: 10.0,
            tcp: Some(TcpView { segments: 1_000_000, ..TcpView::default() }),
            interrupted: false,
            error: None,
        },
        report: Some(ServerReport { link: port("eth9", of_port), ..ServerReport::default() }),
        link: port("eth0", of_port),
        same_host: false,
        error: None,
    }
}

fn report(outcome: &mut ProbeOutcome) -> &mut ServerReport {
    outcome.report.as_mut().unwrap()
}

#[track_caller]
fn says(outcome: &ProbeOutcome, level: VerdictLevel, words: &str) {
    let judgement = judge_bandwidth(outcome);
    assert!(judgement.level == level && judgement.sentence.contains(words), "{judgement:?}");
}

#[test]
fn healthy_in_the_units_of_the_port() {
    assert_eq!(judge_bandwidth(&outcome(373.6, 400)).sentence, "46.7 GB/s of 50: healthy");
    assert_eq!(judge_bandwidth(&outcome(9.41, 10)).sentence, "9.41 of 10 Gb/s: healthy");
    let mut both = outcome(9.0, 10);
    both.measured.total.write_bytes = both.measured.total.read_bytes;
    assert_eq!(judge_bandwidth(&both).sentence, "9 of 10 Gb/s each way: healthy");
    assert!((port_share(&both).unwrap() - 0.9).abs() < 1e-6);
    // The slower end counts.
    let mut uneven = outcome(9.4, 100);
    report(&mut uneven).link = port("eth9", 10);
    assert_eq!(judge_bandwidth(&uneven).sentence, "9.4 of 10 Gb/s: healthy");
}

#[test]
fn ipoib_in_datagram_mode() {
    let mut slow = outcome(6.4, 20);
    slow.link.medium = LinkMedium::Ipoib;
    slow.link.mode = Some("datagram".into());
    let judgement = judge_bandwidth(&slow);
    assert_eq!(judgement.sentence, "6.4 of 20 Gb/s: IPoIB datagram mode, see IPOIB-MODE");
    assert_eq!(judgement.finding, Some("IPOIB-MODE"));
}

#[test]
fn causes_by_the_strength_of_their_evidence() {
    says(&slow_outcome(), VerdictLevel::Poor, "3.75 GB/s of 12.5: less than the ports can do");
    let mut one = slow_outcome();
    one.plan.streams = vec![ProbeOp::Read];
    says(&one, VerdictLevel::Poor, "--streams 4 shows");
    let mut mtu = slow_outcome();
    (mtu.link.mtu, report(&mut mtu).link.mtu) = (Some(1500), Some(1500));
    says(&mtu, VerdictLevel::Poor, "MTU 1500");
    let mut far = slow_outcome();
    far.plan.depth = 1;
    report(&mut far).tcp.rtt_us = 5000;
    says(&far, VerdictLevel::Poor, "too little is under way");
    let mut buffer = slow_outcome();
    report(&mut buffer).tcp.buffer_limited = 0.5;
    says(&buffer, VerdictLevel::Poor, "tcp_wmem");
    report(&mut buffer).tcp.window_limited = 0.5;
    says(&buffer, VerdictLevel::Poor, "tcp_rmem");
    report(&mut buffer).busiest_seconds = 9.9;
    says(&buffer, VerdictLevel::Poor, "one core is full on the other host");
    buffer.measured.busiest_seconds = 9.9;
    says(&buffer, VerdictLevel::Poor, "one core is full on this host");
    report(&mut buffer).tcp.retransmits = 5000;
    says(&buffer, VerdictLevel::Poor, "packets are lost");
}

fn slow_outcome() -> ProbeOutcome {
    outcome(30.0, 100)
}

#[test]
fn nothing_to_compare_with() {
    let mut veth = outcome(30.0, 100);
    report(&mut veth).link.rate_bits = None;
    report(&mut veth).link.evidence = "v0 is virtual".into();
    says(&veth, VerdictLevel::Unknown, "3.75 GB/s (30 Gb/s); v0 is virtual, so there is nothing to compare with");
    assert_eq!(port_share(&veth), None);
    veth.same_host = true;
    says(&veth, VerdictLevel::Unknown, "within this host");
    veth.error = Some("node2 is gone: closed".into());
    says(&veth, VerdictLevel::Broken, "for 10.0 s, then node2 is gone");
    let mut alone = outcome(30.0, 100);
    alone.report = None;
    says(&alone, VerdictLevel::Unknown, "the other end did not report");
}

#[test]
fn the_wrong_way_and_company() {
    let mut wrong = outcome(30.0, 100);
    wrong.link.carried_by = Some("eth1".into());
    says(&wrong, VerdictLevel::Poor, "went over eth1, not over eth0");
    let mut shared = outcome(95.0, 100);
    report(&mut shared).shared_with = 2;
    says(&shared, VerdictLevel::Healthy, "healthy; 2 more measured");
}

#[test]
fn pings_and_large_packets() {
    let mut pinged = PingOutcome {
        times: vec![Duration::from_micros(50); 3],
        large: Some(Duration::from_micros(90)),
        large_size: 64 << 10,
        error: None,
        large_lost: false,
    };
    assert_eq!(
        judge_pings(&pinged, None, None).sentence,
        "3 of 3 answered, and 64 KiB at once: the other end is there"
    );
    pinged.large_lost = true;
    let judgement = judge_pings(&pinged, Some(9000), Some(1500));
    assert!(judgement.level == VerdictLevel::Broken && judgement.sentence.contains("(MTU 9000 here, 1500 there)"));
    pinged.large_lost = false;
    pinged.error = Some("node2 is gone".into());
    assert_eq!(judge_pings(&pinged, None, None).level, VerdictLevel::Broken);
}

#[test]
fn figures_are_short() {
    for (value, text) in [(46.71, "46.7"), (50.0, "50"), (100.0, "100"), (6.4, "6.4"), (0.123, "0.12"), (3.75, "3.75")]
    {
        assert_eq!(short_number(value), text);
    }
    assert_eq!(
        (format_micros(3.456), format_micros(12_345.0), format_micros(2e6)),
        ("3.46 µs".into(), "12.3 ms".into(), "2 s".into())
    );
}

#[test]
fn several_paths_have_their_ports_together() {
    let mut done = outcome(20.0, 100);
    let rail = |here, there| RailOutcome { link: here, peer: there, read_bytes: 1, write_bytes: 0 };
    done.rails = vec![rail(port("r0", 100), Some(port("s0", 100))), rail(port("r1", 100), Some(port("s1", 25)))];
    assert_eq!(
        port_rate(&done).map(|(bits, link)| (bits / 1_000_000_000, link.interface.clone())),
        Some((125, "s1".into()))
    );
    done.rails[1].peer = None;
    assert!(port_rate(&done).is_none(), "one is not known");
    done.rails[0].link.carried_by = Some("r1".into());
    let judged = judge_bandwidth(&done);
    assert!(judged.sentence.contains("not over r0") && judged.finding == Some("SAME-SUBNET"), "{judged:?}");
}
