//! Refused connections in the log: one line per address and time, with a count of what was held back, however many come.
//! It knows no connection.

use parking_lot::Mutex;
use spurline_types::Stats;
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An address is written about no more often than this.
const EVERY: Duration = Duration::from_secs(10);
/// Addresses remembered; all further ones share one place.
const MOST: usize = 1024;

/// Why a connection was refused, as it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// No proof of the group token, or a wrong one.
    Proof,
    /// TLS could not be agreed on.
    Tls,
    /// Bytes that are no frame, or break the protocol.
    Frames,
    /// No whole request in time.
    Silent,
    /// More connections than there may be.
    Limit,
}

/// What was said about an address.
struct Said {
    at: Instant,
    held_back: u64,
}

/// Counts refusals and says them, not too often.
pub struct Refusals {
    stats: Arc<Stats>,
    said: Mutex<HashMap<Option<IpAddr>, Said>>,
}

impl Refusals {
    /// Counts in `stats`.
    pub fn new(stats: Arc<Stats>) -> Refusals {
        Refusals { stats, said: Mutex::new(HashMap::new()) }
    }

    /// A connection of `peer` (an address with or without port) was refused.
    pub fn refused(&self, peer: &str, reason: Reason, why: &dyn fmt::Display) {
        let counted = &self.stats.trust;
        let metric = match reason {
            Reason::Proof => &counted.refused_proof,
            Reason::Tls => &counted.refused_tls,
            Reason::Frames => &counted.refused_frames,
            Reason::Silent => &counted.refused_silent,
            Reason::Limit => &counted.refused_limit,
        };
        metric.add(1);
        self.say(peer, why);
    }

    /// A connection of `peer` ended for a reason that is no refusal.
    pub fn say(&self, peer: &str, why: &dyn fmt::Display) {
        if let Some(held_back) = self.turn(address(peer), Instant::now()) {
            let more = match held_back {
                0 => String::new(),
                n => format!(" ({n} more of that address were not written here)"),
            };
            // What a stranger sent may be in it: no control character reaches a terminal.
            let why = why.to_string();
            let why: String = why.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
            tracing::warn!("connection of {peer} closed: {why}{more}");
        }
    }

    /// Whether the address is to be written about now, and how often it was held back before.
    fn turn(&self, address: Option<IpAddr>, now: Instant) -> Option<u64> {
        let mut said = self.said.lock();
        let mut key = address;
        if said.len() >= MOST && !said.contains_key(&key) {
            said.retain(|_, said| now.duration_since(said.at) < EVERY);
            if said.len() >= MOST {
                key = None;
            }
        }
        match said.get_mut(&key) {
            Some(said) if now.duration_since(said.at) < EVERY => {
                said.held_back += 1;
                None
            }
            Some(said) => {
                said.at = now;
                Some(std::mem::take(&mut said.held_back))
            }
            None => {
                said.insert(key, Said { at: now, held_back: 0 });
                Some(0)
            }
        }
    }
}

fn address(peer: &str) -> Option<IpAddr> {
    peer.parse::<SocketAddr>().map(|addr| addr.ip()).or_else(|_| peer.parse()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_about_now_and_then_and_memory_stays_bounded() {
        let stats = Arc::new(Stats::default());
        let refusals = Refusals::new(Arc::clone(&stats));
        let start = Instant::now();
        let one = address("10.0.0.1:99");
        assert_eq!(one, address("10.0.0.1"));
        assert_eq!(refusals.turn(one, start), Some(0));
        assert_eq!(refusals.turn(one, start), None);
        assert_eq!(refusals.turn(one, start + EVERY / 2), None);
        assert_eq!(refusals.turn(address("[::1]:7"), start), Some(0));
        assert_eq!(refusals.turn(one, start + EVERY), Some(2));
        let mut lines = 0;
        for n in 0..10_000u32 {
            lines += usize::from(refusals.turn(Some(IpAddr::V4(n.into())), start + EVERY).is_some());
        }
        assert!(lines <= MOST + 1 && refusals.said.lock().len() <= MOST + 1, "{lines}");
        // Later all of them are forgotten.
        assert_eq!(refusals.turn(Some(IpAddr::V4(77_777.into())), start + EVERY * 3), Some(0));
        assert!(refusals.said.lock().len() < 10);
        refusals.refused("10.0.0.1:1", Reason::Proof, &"no\x1b[2J token");
        refusals.refused("?", Reason::Silent, &"nothing came");
        assert_eq!((stats.trust.refused_proof.get(), stats.trust.refused_silent.get()), (1, 1));
    }
}
