//! Verdicts on measurements: a sentence, and the finding behind. Works on figures only.

use crate::link::{InterfaceLink, LinkMedium};
use crate::measure::{PingOutcome, ProbeOutcome};
use crate::message::{ProbeTransport, TcpView};
use std::time::Duration;

/// The level of a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerdictLevel {
    /// Close to the port's rate.
    Healthy,
    /// Less than expected.
    Poor,
    /// No reference to compare with.
    Unknown,
    /// The measurement did not complete.
    Broken,
}

impl VerdictLevel {
    /// 0 for the best, 3 for the worst.
    pub fn severity(self) -> u8 {
        match self {
            VerdictLevel::Healthy => 0,
            VerdictLevel::Unknown => 1,
            VerdictLevel::Poor => 2,
            VerdictLevel::Broken => 3,
        }
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            VerdictLevel::Healthy => "healthy",
            VerdictLevel::Poor => "poor",
            VerdictLevel::Unknown => "unknown",
            VerdictLevel::Broken => "broken",
        }
    }
}

/// A verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeVerdict {
    /// The level.
    pub level: VerdictLevel,
    /// A sentence for a person.
    pub sentence: String,
    /// Id of the explaining finding, as in `net doctor`.
    pub finding: Option<&'static str>,
    /// Findings on both ends that may contribute; filled in by the caller.
    pub causes: Vec<RelatedFinding>,
}

/// A finding that may be the cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelatedFinding {
    /// The id.
    pub id: &'static str,
    /// The subject.
    pub subject: String,
    /// Whether the subject is on this host.
    pub here: bool,
}

impl ProbeVerdict {
    fn new(level: VerdictLevel, sentence: String) -> Self {
        ProbeVerdict { level, sentence, finding: None, causes: Vec::new() }
    }
}

/// TCP payload is 0.94 of an Ethernet port at MTU 1500; from this share on no cause is searched.
const HEALTHY_SHARE: f64 = 0.85;
/// Share of segments; a higher loss shows in the rate.
const LOSS_SHARE: f64 = 0.001;
/// Share of the time in which a thread is busy.
const BUSY_SHARE: f64 = 0.9;
/// Share of the time in which a window or a buffer is the limit.
const LIMITED_SHARE: f64 = 0.3;
/// Round trips of a local network, with interrupts, in microseconds.
const LOCAL_US: f64 = 200.0;
/// The same over verbs, without the kernel, with sleeps instead of polling.
const LOCAL_RDMA_US: f64 = 50.0;
/// A longer round trip is not local, or is delayed.
const FAR_US: f64 = 1000.0;

/// Bytes per second of a measurement, in each direction.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ByteRates {
    /// From the server to the client.
    pub read: f64,
    /// From the client to the server.
    pub write: f64,
}

/// The rates of a measurement.
pub fn byte_rates(outcome: &ProbeOutcome) -> ByteRates {
    let seconds = outcome.measured.elapsed.as_secs_f64().max(1e-9);
    let total = &outcome.measured.total;
    ByteRates { read: total.read_bytes as f64 / seconds, write: total.write_bytes as f64 / seconds }
}

/// The slower of both ends' ports in bits per second, and the interface; of several paths the sum, and the slowest.
pub fn port_rate(outcome: &ProbeOutcome) -> Option<(u64, &InterfaceLink)> {
    if outcome.rails.is_empty() {
        return slower_end(&outcome.link, outcome.report.as_ref().map(|r| &r.link));
    }
    let each = outcome.rails.iter().map(|rail| slower_end(&rail.link, rail.peer.as_ref()));
    let each: Vec<(u64, &InterfaceLink)> = each.collect::<Option<_>>()?;
    let sum = each.iter().fold(0u64, |sum, (rate, _)| sum.saturating_add(*rate));
    each.into_iter().min_by_key(|(rate, _)| *rate).map(|(_, link)| (sum, link))
}

/// The slower end of a path. Both rates must be known: the unknown rate may be the slower.
pub fn slower_end<'a>(here: &'a InterfaceLink, there: Option<&'a InterfaceLink>) -> Option<(u64, &'a InterfaceLink)> {
    let here = (here.rate_bits?, here);
    let there = (there?.rate_bits?, there?);
    Some(if there.0 < here.0 { there } else { here })
}

/// The interfaces of both ends, of all paths.
fn all_ends(outcome: &ProbeOutcome) -> Vec<&InterfaceLink> {
    if outcome.rails.is_empty() {
        let there = outcome.report.as_ref().map(|r| &r.link);
        return [Some(&outcome.link), there].into_iter().flatten().collect();
    }
    outcome.rails.iter().flat_map(|rail| [Some(&rail.link), rail.peer.as_ref()]).flatten().collect()
}

/// The rate as a share of the ports' capacity in the directions used.
pub fn port_share(outcome: &ProbeOutcome) -> Option<f64> {
    let (port, _) = port_rate(outcome)?;
    let rates = byte_rates(outcome);
    let ways = f64::from(u8::from(rates.read > 0.0) + u8::from(rates.write > 0.0)).max(1.0);
    Some((rates.read + rates.write) * 8.0 / ways / port.max(1) as f64)
}

/// Bytes per second in the unit of the port's class: GB/s from 100 Gb/s on, Gb/s below.
fn rate_of_port(bytes_per_second: f64, port_bits: u64) -> String {
    let bits = port_bits as f64;
    if bits >= 100e9 {
        format!("{} GB/s of {}", short_number(bytes_per_second / 1e9), short_number(bits / 8e9))
    } else {
        format!("{} of {} Gb/s", short_number(bytes_per_second * 8.0 / 1e9), short_number(bits / 1e9))
    }
}

/// At most three significant digits, without trailing zeros.
fn short_number(value: f64) -> String {
    let text = if value >= 99.95 {
        format!("{value:.0}")
    } else if value >= 9.995 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Judges bandwidth.
pub fn judge_bandwidth(outcome: &ProbeOutcome) -> ProbeVerdict {
    let rates = byte_rates(outcome);
    let ways = f64::from(u8::from(rates.read > 0.0) + u8::from(rates.write > 0.0)).max(1.0);
    let each = (rates.read + rates.write) / ways;
    let both = if ways > 1.0 { " each way" } else { "" };
    let alone = format!("{} GB/s ({} Gb/s){both}", short_number(each / 1e9), short_number(each * 8.0 / 1e9));
    if let Some(error) = &outcome.error {
        let seconds = outcome.measured.elapsed.as_secs_f64();
        return ProbeVerdict::new(VerdictLevel::Broken, format!("{alone} for {seconds:.1} s, then {error}"));
    }
    if outcome.same_host {
        return ProbeVerdict::new(VerdictLevel::Unknown, format!("{alone} within this host: no network was measured"));
    }
    if let Some((wrong, other)) = carried_elsewhere(outcome) {
        let sentence = format!(
            "{alone}, but it went over {other}, not over {}, which has the address {}: two interfaces in one subnet or \
             a route cause this, see SAME-SUBNET",
            wrong.interface, wrong.address
        );
        return ProbeVerdict { finding: Some("SAME-SUBNET"), ..ProbeVerdict::new(VerdictLevel::Poor, sentence) };
    }
    let Some((port, link)) = port_rate(outcome) else {
        let why = all_ends(outcome).into_iter().find(|l| l.rate_bits.is_none());
        let why = why.map_or("the other end did not report its port's rate", |l| l.evidence.as_str());
        return ProbeVerdict::new(
            VerdictLevel::Unknown,
            format!("{alone}; {why}, so there is nothing to compare with"),
        );
    };
    let measured = format!("{}{both}", rate_of_port(each, port));
    let share = each * 8.0 / port.max(1) as f64;
    let mut judgement = if share >= HEALTHY_SHARE {
        ProbeVerdict::new(VerdictLevel::Healthy, format!("{measured}: healthy"))
    } else {
        let (why, finding) = likely_cause(outcome, link, each);
        ProbeVerdict { finding, ..ProbeVerdict::new(VerdictLevel::Poor, format!("{measured}: {why}")) }
    };
    if let Some(others) = outcome.report.as_ref().map(|r| r.shared_with).filter(|n| *n > 0) {
        judgement.sentence.push_str(&format!("; {others} more measured there at the same time"));
    }
    judgement
}

/// The end where an interface without the address carried the bytes, and that interface.
fn carried_elsewhere(outcome: &ProbeOutcome) -> Option<(&InterfaceLink, &str)> {
    all_ends(outcome).into_iter().find_map(|link| Some((link, link.carried_by.as_deref()?)))
}

/// The most likely reason for a rate below the port's; the strongest evidence comes first.
fn likely_cause(
    outcome: &ProbeOutcome,
    slower: &InterfaceLink,
    bytes_per_second: f64,
) -> (String, Option<&'static str>) {
    let report = outcome.report.as_ref();
    let local_tcp = outcome.measured.tcp.clone().unwrap_or_default();
    let peer_tcp = report.map(|r| r.tcp.clone()).unwrap_or_default();
    if all_ends(outcome).into_iter().any(is_datagram_ipoib) {
        return ("IPoIB datagram mode, see IPOIB-MODE".into(), Some("IPOIB-MODE"));
    }
    let lost = local_tcp.retransmits + peer_tcp.retransmits;
    if lost as f64 > (local_tcp.segments + peer_tcp.segments) as f64 * LOSS_SHARE {
        let all = local_tcp.segments + peer_tcp.segments;
        return (format!("packets are lost on the way ({lost} of {all} segments were sent again)"), None);
    }
    let wall = outcome.measured.wall_seconds.max(1e-9);
    let full = |busiest: f64| busiest / wall >= BUSY_SHARE;
    let many = format!("more streams than {} can use more cores (--streams)", outcome.plan.streams.len());
    if full(outcome.measured.busiest_seconds) {
        return (format!("one core is full on this host; {many}"), None);
    }
    if report.is_some_and(|r| full(r.busiest_seconds)) {
        return (format!("one core is full on the other host; {many}"), None);
    }
    let limited = |of: fn(&TcpView) -> f64| of(&local_tcp).max(of(&peer_tcp)) >= LIMITED_SHARE;
    if limited(|v| v.window_limited) {
        return ("the receiver's window limits it: raise net.ipv4.tcp_rmem, or use more --streams".into(), None);
    }
    if limited(|v| v.buffer_limited) {
        return ("the sender's buffer limits it: raise net.ipv4.tcp_wmem, or use more --streams".into(), None);
    }
    let rtt = Duration::from_micros(local_tcp.rtt_us.max(peer_tcp.rtt_us)).as_secs_f64();
    let under_way = outcome.plan.size as f64 * f64::from(outcome.plan.depth) * outcome.plan.streams.len() as f64;
    if rtt > 0.0 && under_way / rtt < bytes_per_second * 1.5 {
        return ("too little is under way for this round trip: raise --depth or --size".into(), None);
    }
    if outcome.plan.streams.len() == 1 {
        return ("one stream; --streams 4 shows whether the link can do more".into(), None);
    }
    if slower.mtu == Some(1500) && slower.rate_bits >= Some(25_000_000_000) {
        return (
            "MTU 1500 costs much processor time at this rate, 9000 costs less, see MTU-LOW".into(),
            Some("MTU-LOW"),
        );
    }
    ("less than the ports can do, and no single cause shows: spurline net doctor on both hosts".into(), None)
}

fn is_datagram_ipoib(link: &InterfaceLink) -> bool {
    link.medium == LinkMedium::Ipoib && link.mode.as_deref() == Some("datagram")
}

/// Judges latency.
pub fn judge_latency(outcome: &ProbeOutcome) -> ProbeVerdict {
    let Some((_, times)) = outcome.measured.times.iter().find(|(_, t)| t.count() > 0) else {
        let why = outcome.error.clone().unwrap_or_else(|| "nothing was measured".into());
        return ProbeVerdict::new(VerdictLevel::Broken, why);
    };
    let half = times.quantile_us(0.5);
    let rare = times.quantile_us(0.99);
    let measured = format!(
        "{} round trip ({} one way), 99 % within {}",
        format_micros(half),
        format_micros(half / 2.0),
        format_micros(rare)
    );
    let over = outcome.plan.transport;
    if let Some(error) = &outcome.error {
        return ProbeVerdict::new(VerdictLevel::Broken, format!("{measured}, then {error}"));
    }
    if outcome.same_host {
        return ProbeVerdict::new(
            VerdictLevel::Unknown,
            format!("{measured}, within this host: no network was measured"),
        );
    }
    let mut judgement = if half > FAR_US {
        let why = "far for one network: a long way, a relay, or a queue on it";
        ProbeVerdict::new(VerdictLevel::Poor, format!("{measured}: {why}"))
    } else if half > if over == ProbeTransport::Tcp { LOCAL_US } else { LOCAL_RDMA_US } {
        let why = "slow for one network: power saving (see CPU-GOVERNOR), interrupt coalescing, or busy processors";
        ProbeVerdict {
            finding: Some("CPU-GOVERNOR"),
            ..ProbeVerdict::new(VerdictLevel::Poor, format!("{measured}: {why}"))
        }
    } else if rare > half * 20.0 {
        ProbeVerdict::new(
            VerdictLevel::Poor,
            format!("{measured}: stable except for rare delays, as busy processors or queues cause"),
        )
    } else {
        ProbeVerdict::new(VerdictLevel::Healthy, format!("{measured}: healthy for {}", over.name()))
    };
    if let Some(others) = outcome.report.as_ref().map(|r| r.shared_with).filter(|n| *n > 0) {
        judgement.sentence.push_str(&format!("; {others} more measured there at the same time"));
    }
    judgement
}

/// Judges pings.
pub fn judge_pings(pinged: &PingOutcome, mtu_here: Option<u32>, mtu_there: Option<u32>) -> ProbeVerdict {
    if pinged.large_lost {
        let sizes = match (mtu_here, mtu_there) {
            (Some(here), Some(there)) => format!(" (MTU {here} here, {there} there)"),
            _ => String::new(),
        };
        let large = pinged.large_size >> 10;
        let sentence = format!(
            "small messages come back, one of {large} KiB does not{sizes}: something between drops large packets; give \
             all interfaces and switch ports on the way the same MTU"
        );
        return ProbeVerdict {
            finding: Some("PEER-MTU"),
            ..ProbeVerdict::new(VerdictLevel::Broken, format!("{sentence}, see PEER-MTU"))
        };
    }
    if let Some(error) = &pinged.error {
        return ProbeVerdict::new(VerdictLevel::Broken, error.clone());
    }
    if pinged.times.is_empty() {
        return ProbeVerdict::new(VerdictLevel::Unknown, "nothing was measured".into());
    }
    let count = pinged.times.len();
    let large = pinged.large.map(|_| format!(", and {} KiB at once", pinged.large_size >> 10)).unwrap_or_default();
    ProbeVerdict::new(VerdictLevel::Healthy, format!("{count} of {count} answered{large}: the other end is there"))
}

/// A time with a suitable unit.
pub fn format_micros(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{} s", short_number(us / 1e6)),
        us if us >= 1e3 => format!("{} ms", short_number(us / 1e3)),
        us => format!("{} µs", short_number(us)),
    }
}

#[cfg(test)]
mod tests;
