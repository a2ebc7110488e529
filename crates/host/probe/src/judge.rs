//! What to make of a measurement: one sentence, and where to read on. It has figures only, and touches nothing.

use crate::link::{Link, Medium};
use crate::measure::{Outcome, Pinged};
use crate::message::{TcpView, Transport};
use std::time::Duration;

/// How good it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// What the port can do, or near it.
    Healthy,
    /// Less than it should be.
    Poor,
    /// There is nothing to compare with.
    Unknown,
    /// It did not come to its end.
    Broken,
}

impl Level {
    /// The worst has the highest.
    pub fn badness(self) -> u8 {
        match self {
            Level::Healthy => 0,
            Level::Unknown => 1,
            Level::Poor => 2,
            Level::Broken => 3,
        }
    }

    /// As in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Healthy => "healthy",
            Level::Poor => "poor",
            Level::Unknown => "unknown",
            Level::Broken => "broken",
        }
    }
}

/// The judgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    /// How good.
    pub level: Level,
    /// One sentence for a person.
    pub sentence: String,
    /// The id of the finding that explains it, as `net doctor` has it.
    pub finding: Option<&'static str>,
    /// Findings on both ends that may have a part in it; whoever knows them fills them in.
    pub causes: Vec<Cause>,
}

/// A finding that may be why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// Its id.
    pub id: &'static str,
    /// What it is about.
    pub subject: String,
    /// Whether it is this host's.
    pub here: bool,
}

impl Judgement {
    fn new(level: Level, sentence: String) -> Self {
        Judgement { level, sentence, finding: None, causes: Vec::new() }
    }
}

/// TCP payload is 0.94 of an Ethernet port at MTU 1500; from here on the rest is no fault of anything.
const HEALTHY: f64 = 0.85;
/// Of segments; above this loss shows in the rate.
const LOSS: f64 = 0.001;
/// Share of the time in which a thread is as busy as it can be.
const FULL: f64 = 0.9;
/// Share of the time in which a window or a buffer is what limits.
const LIMITED: f64 = 0.3;
/// Round trips of a local network, with interrupts, are below this; in microseconds.
const LOCAL_US: f64 = 200.0;
/// The same for verbs, where no kernel is in between, with sleeping instead of polling.
const LOCAL_RDMA_US: f64 = 50.0;
/// Above this the other end is not on the local network, or something delays.
const FAR_US: f64 = 1000.0;

/// Bytes per second of a measurement, each way.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rates {
    /// From the server to the client.
    pub read: f64,
    /// From the client to the server.
    pub write: f64,
}

/// What moved per second.
pub fn rates(outcome: &Outcome) -> Rates {
    let seconds = outcome.measured.elapsed.as_secs_f64().max(1e-9);
    let total = &outcome.measured.total;
    Rates { read: total.read_bytes as f64 / seconds, write: total.write_bytes as f64 / seconds }
}

/// The slower of both ends' ports in bits per second, and whose it is; of several paths their sum, and the slowest.
pub fn port_rate(outcome: &Outcome) -> Option<(u64, &Link)> {
    if outcome.rails.is_empty() {
        return slower(&outcome.link, outcome.report.as_ref().map(|r| &r.link));
    }
    let each = outcome.rails.iter().map(|rail| slower(&rail.link, rail.peer.as_ref()));
    let each: Vec<(u64, &Link)> = each.collect::<Option<_>>()?;
    let sum = each.iter().fold(0u64, |sum, (rate, _)| sum.saturating_add(*rate));
    each.into_iter().min_by_key(|(rate, _)| *rate).map(|(_, link)| (sum, link))
}

/// The slower of a path's two ends. Both must be known: the unknown one may be the slower.
pub fn slower<'a>(here: &'a Link, there: Option<&'a Link>) -> Option<(u64, &'a Link)> {
    let (here, there) = ((here.rate_bits?, here), (there?.rate_bits?, there?));
    Some(if there.0 < here.0 { there } else { here })
}

/// The links of both ends, of all paths.
fn ends(outcome: &Outcome) -> Vec<&Link> {
    if outcome.rails.is_empty() {
        let there = outcome.report.as_ref().map(|r| &r.link);
        return [Some(&outcome.link), there].into_iter().flatten().collect();
    }
    outcome.rails.iter().flat_map(|rail| [Some(&rail.link), rail.peer.as_ref()]).flatten().collect()
}

/// The rate as a share of what the ports can carry the ways it went.
pub fn share(outcome: &Outcome) -> Option<f64> {
    let (port, _) = port_rate(outcome)?;
    let rates = rates(outcome);
    let ways = f64::from(u8::from(rates.read > 0.0) + u8::from(rates.write > 0.0)).max(1.0);
    Some((rates.read + rates.write) * 8.0 / ways / port.max(1) as f64)
}

/// Bytes per second as people who buy such ports say it: in GB/s from 100 Gb/s on, in Gb/s below.
fn of_port(bytes_per_second: f64, port_bits: u64) -> String {
    let bits = port_bits as f64;
    if bits >= 100e9 {
        format!("{} GB/s of {}", short(bytes_per_second / 1e9), short(bits / 8e9))
    } else {
        format!("{} of {} Gb/s", short(bytes_per_second * 8.0 / 1e9), short(bits / 1e9))
    }
}

/// Three digits at most, and none that say nothing.
fn short(value: f64) -> String {
    let text = if value >= 99.95 {
        format!("{value:.0}")
    } else if value >= 9.995 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Judges a measurement of bandwidth.
pub fn bandwidth(outcome: &Outcome) -> Judgement {
    let rates = rates(outcome);
    let ways = f64::from(u8::from(rates.read > 0.0) + u8::from(rates.write > 0.0)).max(1.0);
    let each = (rates.read + rates.write) / ways;
    let both = if ways > 1.0 { " each way" } else { "" };
    let alone = format!("{} GB/s ({} Gb/s){both}", short(each / 1e9), short(each * 8.0 / 1e9));
    if let Some(error) = &outcome.error {
        let seconds = outcome.measured.elapsed.as_secs_f64();
        return Judgement::new(Level::Broken, format!("{alone} for {seconds:.1} s, then {error}"));
    }
    if outcome.same_host {
        return Judgement::new(Level::Unknown, format!("{alone} within this host: no network was measured"));
    }
    if let Some((wrong, other)) = taken_elsewhere(outcome) {
        let sentence = format!(
            "{alone}, but it went over {other}, not over {}, which has the address {}: two interfaces in one subnet or \
             a route decide so, see SAME-SUBNET",
            wrong.interface, wrong.address
        );
        return Judgement { finding: Some("SAME-SUBNET"), ..Judgement::new(Level::Poor, sentence) };
    }
    let Some((port, link)) = port_rate(outcome) else {
        let why = ends(outcome).into_iter().find(|l| l.rate_bits.is_none());
        let why = why.map_or("the other end did not tell its port's rate", |l| l.evidence.as_str());
        return Judgement::new(Level::Unknown, format!("{alone}; {why}, so there is nothing to compare with"));
    };
    let measured = format!("{}{both}", of_port(each, port));
    let share = each * 8.0 / port.max(1) as f64;
    let mut judgement = if share >= HEALTHY {
        Judgement::new(Level::Healthy, format!("{measured}: healthy"))
    } else {
        let (why, finding) = cause(outcome, link, each);
        Judgement { finding, ..Judgement::new(Level::Poor, format!("{measured}: {why}")) }
    };
    if let Some(others) = outcome.report.as_ref().map(|r| r.shared_with).filter(|n| *n > 0) {
        judgement.sentence.push_str(&format!("; {others} more measured there at the same time"));
    }
    judgement
}

/// The end at which another interface than the one with the address carried the bytes, and that interface.
fn taken_elsewhere(outcome: &Outcome) -> Option<(&Link, &str)> {
    ends(outcome).into_iter().find_map(|link| Some((link, link.carried_by.as_deref()?)))
}

/// The most likely reason for a rate below the port's, the strongest evidence first.
fn cause(outcome: &Outcome, slower: &Link, bytes_per_second: f64) -> (String, Option<&'static str>) {
    let report = outcome.report.as_ref();
    let mine = outcome.measured.tcp.clone().unwrap_or_default();
    let theirs = report.map(|r| r.tcp.clone()).unwrap_or_default();
    let datagram = |link: &Link| link.medium == Medium::Ipoib && link.mode.as_deref() == Some("datagram");
    if ends(outcome).into_iter().any(datagram) {
        return ("IPoIB datagram mode, see IPOIB-MODE".into(), Some("IPOIB-MODE"));
    }
    let lost = mine.retransmits + theirs.retransmits;
    if lost as f64 > (mine.segments + theirs.segments) as f64 * LOSS {
        let all = mine.segments + theirs.segments;
        return (format!("packets are lost on the way ({lost} of {all} segments were sent again)"), None);
    }
    let wall = outcome.measured.wall_seconds.max(1e-9);
    let full = |busiest: f64| busiest / wall >= FULL;
    let many = format!("more streams than {} can use more cores (--streams)", outcome.plan.streams.len());
    if full(outcome.measured.busiest_seconds) {
        return (format!("one core is full on this host; {many}"), None);
    }
    if report.is_some_and(|r| full(r.busiest_seconds)) {
        return (format!("one core is full on the other host; {many}"), None);
    }
    let limited = |of: fn(&TcpView) -> f64| of(&mine).max(of(&theirs)) >= LIMITED;
    if limited(|v| v.window_limited) {
        return ("the receiver's window limits it: raise net.ipv4.tcp_rmem, or use more --streams".into(), None);
    }
    if limited(|v| v.buffer_limited) {
        return ("the sender's buffer limits it: raise net.ipv4.tcp_wmem, or use more --streams".into(), None);
    }
    let rtt = Duration::from_micros(mine.rtt_us.max(theirs.rtt_us)).as_secs_f64();
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

/// Judges a measurement of latency.
pub fn latency(outcome: &Outcome) -> Judgement {
    let Some((_, times)) = outcome.measured.times.iter().find(|(_, t)| t.count() > 0) else {
        let why = outcome.error.clone().unwrap_or_else(|| "nothing was measured".into());
        return Judgement::new(Level::Broken, why);
    };
    let (half, rare) = (times.quantile_us(0.5), times.quantile_us(0.99));
    let measured =
        format!("{} there and back ({} one way), 99 % within {}", micros(half), micros(half / 2.0), micros(rare));
    let over = outcome.plan.transport;
    if let Some(error) = &outcome.error {
        return Judgement::new(Level::Broken, format!("{measured}, then {error}"));
    }
    if outcome.same_host {
        return Judgement::new(Level::Unknown, format!("{measured}, within this host: no network was measured"));
    }
    let mut judgement = if half > FAR_US {
        let why = "far for one network: a long way, a relay, or a queue on it";
        Judgement::new(Level::Poor, format!("{measured}: {why}"))
    } else if half > if over == Transport::Tcp { LOCAL_US } else { LOCAL_RDMA_US } {
        let why = "slow for one network: power saving (see CPU-GOVERNOR), interrupt coalescing, or busy processors";
        Judgement { finding: Some("CPU-GOVERNOR"), ..Judgement::new(Level::Poor, format!("{measured}: {why}")) }
    } else if rare > half * 20.0 {
        Judgement::new(Level::Poor, format!("{measured}: steady but for rare waits, as of busy processors or queues"))
    } else {
        Judgement::new(Level::Healthy, format!("{measured}: healthy for {}", over.name()))
    };
    if let Some(others) = outcome.report.as_ref().map(|r| r.shared_with).filter(|n| *n > 0) {
        judgement.sentence.push_str(&format!("; {others} more measured there at the same time"));
    }
    judgement
}

/// Judges pings.
pub fn pings(pinged: &Pinged, mtu: (Option<u32>, Option<u32>)) -> Judgement {
    if pinged.large_lost {
        let sizes = match mtu {
            (Some(here), Some(there)) => format!(" (MTU {here} here, {there} there)"),
            _ => String::new(),
        };
        let large = pinged.large_size >> 10;
        let sentence = format!(
            "small messages come back, one of {large} KiB does not{sizes}: something between drops large packets; give \
             all interfaces and switch ports on the way the same MTU"
        );
        return Judgement {
            finding: Some("PEER-MTU"),
            ..Judgement::new(Level::Broken, format!("{sentence}, see PEER-MTU"))
        };
    }
    if let Some(error) = &pinged.error {
        return Judgement::new(Level::Broken, error.clone());
    }
    if pinged.times.is_empty() {
        return Judgement::new(Level::Unknown, "nothing was measured".into());
    }
    let count = pinged.times.len();
    let large = pinged.large.map(|_| format!(", and {} KiB at once", pinged.large_size >> 10)).unwrap_or_default();
    Judgement::new(Level::Healthy, format!("{count} of {count} answered{large}: the other end is there"))
}

/// A time as people say it.
pub fn micros(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{} s", short(us / 1e6)),
        us if us >= 1e3 => format!("{} ms", short(us / 1e3)),
        us => format!("{} µs", short(us)),
    }
}

#[cfg(test)]
mod tests;
