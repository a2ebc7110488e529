//! What the tests of registries share: nodes, a registry by its URL, deadlines.
#![allow(dead_code, reason = "each test program uses a part")]

use spurline_membership::Registry;
use spurline_trust::Trust;
use spurline_types::Member;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longer than anything here takes on the busiest machine.
const LIMIT: Duration = Duration::from_secs(120);

/// A node at a port of loopback.
pub fn node(name: &str, port: u16) -> Member {
    Member { name: name.into(), instance: u64::from(port), ..Member::from_address(&format!("127.0.0.1:{port}"), 100) }
}

/// The registry of group `g` behind a URL.
pub fn open(url: &str) -> Arc<dyn Registry> {
    of_group(url, "g")
}

/// The registry of any group.
pub fn of_group(url: &str, group: &str) -> Arc<dyn Registry> {
    spurline_membership::open_registry(&url.parse().unwrap(), group, &Trust::without_checks()).unwrap()
}

/// Waits until `done`.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT, "{what} did not come within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
