//! The log of refused connections: a line for each address and interval, with a count of suppressed lines, however many
//! connections arrive. Knows no connection.

use parking_lot::Mutex;
use spurline_types::Stats;
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of log lines about the same address.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Limit of remembered addresses; all others share an entry.
const MAX_ADDRESSES: usize = 1024;

/// Why a connection was refused, by counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// No proof of the group token, or a wrong proof.
    Proof,
    /// The TLS handshake failed.
    Tls,
    /// The bytes are no frame, or violate the protocol.
    Frames,
    /// No complete request in time.
    Silent,
    /// The connection limit is reached.
    Limit,
}

/// The log state of an address.
struct LoggedAddress {
    at: Instant,
    held_back: u64,
}

/// Counts refusals and logs refusals at a limited rate.
pub struct RefusalLog {
    stats: Arc<Stats>,
    logged: Mutex<HashMap<Option<IpAddr>, LoggedAddress>>,
}

impl RefusalLog {
    /// A log that counts in `stats`.
    pub fn new(stats: Arc<Stats>) -> RefusalLog {
        RefusalLog { stats, logged: Mutex::new(HashMap::new()) }
    }

    /// Records that a connection of `peer` (an address with or without port) was refused.
    pub fn record_refusal(&self, peer: &str, reason: RefusalReason, why: &dyn fmt::Display) {
        let counted = &self.stats.trust;
        let metric = match reason {
            RefusalReason::Proof => &counted.refused_proof,
            RefusalReason::Tls => &counted.refused_tls,
            RefusalReason::Frames => &counted.refused_frames,
            RefusalReason::Silent => &counted.refused_silent,
            RefusalReason::Limit => &counted.refused_limit,
        };
        metric.add(1);
        self.log_closed(peer, why);
    }

    /// Logs that a connection of `peer` ended for a reason that is no refusal.
    pub fn log_closed(&self, peer: &str, why: &dyn fmt::Display) {
        if let Some(held_back) = self.take_held_back(parse_address(peer), Instant::now()) {
            let more = match held_back {
                0 => String::new(),
                n => format!(" ({n} more from that address were not logged)"),
            };
            // The text may contain bytes from a stranger: no control character may reach a terminal.
            let why = why.to_string();
            let why: String = why.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
            tracing::warn!("connection of {peer} closed: {why}{more}");
        }
    }

    /// Whether to log the address now, and the number of lines suppressed before.
    fn take_held_back(&self, address: Option<IpAddr>, now: Instant) -> Option<u64> {
        let mut said = self.logged.lock();
        let mut key = address;
        if said.len() >= MAX_ADDRESSES && !said.contains_key(&key) {
            said.retain(|_, said| now.duration_since(said.at) < REFUSAL_LOG_INTERVAL);
            if said.len() >= MAX_ADDRESSES {
                key = None;
            }
        }
        match said.get_mut(&key) {
            Some(said) if now.duration_since(said.at) < REFUSAL_LOG_INTERVAL => {
                said.held_back += 1;
                None
            }
            Some(said) => {
                said.at = now;
                Some(std::mem::take(&mut said.held_back))
            }
            None => {
                said.insert(key, LoggedAddress { at: now, held_back: 0 });
                Some(0)
            }
        }
    }
}

fn parse_address(peer: &str) -> Option<IpAddr> {
    peer.parse::<SocketAddr>().map(|addr| addr.ip()).or_else(|_| peer.parse()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_about_now_and_then_and_memory_stays_bounded() {
        let stats = Arc::new(Stats::default());
        let refusals = RefusalLog::new(Arc::clone(&stats));
        let start = Instant::now();
        let one = parse_address("10.0.0.1:99");
        assert_eq!(one, parse_address("10.0.0.1"));
        assert_eq!(refusals.take_held_back(one, start), Some(0));
        assert_eq!(refusals.take_held_back(one, start), None);
        assert_eq!(refusals.take_held_back(one, start + REFUSAL_LOG_INTERVAL / 2), None);
        assert_eq!(refusals.take_held_back(parse_address("[::1]:7"), start), Some(0));
        assert_eq!(refusals.take_held_back(one, start + REFUSAL_LOG_INTERVAL), Some(2));
        let mut lines = 0;
        for n in 0..10_000u32 {
            lines += usize::from(
                refusals.take_held_back(Some(IpAddr::V4(n.into())), start + REFUSAL_LOG_INTERVAL).is_some(),
            );
        }
        assert!(lines <= MAX_ADDRESSES + 1 && refusals.logged.lock().len() <= MAX_ADDRESSES + 1, "{lines}");
        // Later all of them are forgotten.
        assert_eq!(refusals.take_held_back(Some(IpAddr::V4(77_777.into())), start + REFUSAL_LOG_INTERVAL * 3), Some(0));
        assert!(refusals.logged.lock().len() < 10);
        refusals.record_refusal("10.0.0.1:1", RefusalReason::Proof, &"no\x1b[2J token");
        refusals.record_refusal("?", RefusalReason::Silent, &"nothing came");
        assert_eq!((stats.trust.refused_proof.get(), stats.trust.refused_silent.get()), (1, 1));
    }
}
