//! Keeps a node's folder rules equal to those in the registry: reads them every few seconds, at the cost of a request only after
//! a change, and stores the rules beside the node's blocks.

use super::state_file::RuleFiles;
use spurline_config::Fault;
use spurline_membership::Registry;
use spurline_node::CacheNode;
use spurline_rules::{RuleSet, RuleStore};
use spurline_sys::random;
use spurline_types::{Error, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Mean time between two reads; each is drawn from half of this to three halves, so that nodes started together do not read
/// together.
const RULES_READ_INTERVAL: Duration = Duration::from_secs(5);

/// The registry is read until this is dropped; a running request ends by a deadline.
pub struct RuleFollower {
    _open: mpsc::Sender<()>,
}

/// Applies the registry's rules to a node: the present rules before this returns, or the `kept` rules when the registry can't be
/// reached, and later changes. `None` where the registry stores none.
///
/// # Errors
/// When no thread can be started.
pub fn start_following(
    node: &Arc<CacheNode>,
    registry: &Arc<dyn Registry>,
    mut kept: RuleFiles,
) -> Result<Option<RuleFollower>, Fault> {
    let Some(store) = RuleStore::open(registry.as_ref()) else { return Ok(None) };
    let mut said = report_failure(exchange_rules(node, &store, &kept.merged_rules()), false);
    kept.store_rules(&node.rules());
    let (open, ended) = mpsc::channel();
    let node = Arc::downgrade(node);
    let thread = std::thread::Builder::new().name("rules".into()).spawn(move || {
        loop {
            if ended.recv_timeout(jittered_pause(random())) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let Some(node) = node.upgrade() else { return };
            said = report_failure(exchange_rules(&node, &store, &node.rules()), said);
            kept.store_rules(&node.rules());
        }
    });
    thread.map_err(|e| Error::io("a thread for the rules of the group", &e))?;
    Ok(Some(RuleFollower { _open: open }))
}

/// [`RULES_READ_INTERVAL`], shorter or longer by a drawn number.
fn jittered_pause(drawn: u64) -> Duration {
    RULES_READ_INTERVAL / 2 + RULES_READ_INTERVAL.mul_f64((drawn >> 11) as f64 / (1u64 << 53) as f64)
}

fn exchange_rules(node: &CacheNode, store: &RuleStore, own: &RuleSet) -> Result<(), Error> {
    let stored = store.read_or_restore(own);
    // Only after the registry was read: a block of an unknown class would lose the class.
    node.take_rules(stored.as_ref().unwrap_or(own));
    stored.map(drop)
}

/// Logs once why the rules can't be read. The follower of the registry logs the registry's loss.
fn report_failure(asked: Result<(), Error>, said: bool) -> bool {
    match asked {
        Ok(()) => false,
        Err(error) if error.kind() == ErrorKind::Unavailable => said,
        Err(error) => {
            if !said {
                tracing::warn!("the folder rules can't be read: {error}; continuing with the known ones");
            }
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_look_at_different_times_and_about_as_often() {
        assert!(
            jittered_pause(0) == RULES_READ_INTERVAL / 2 && jittered_pause(u64::MAX) <= RULES_READ_INTERVAL * 3 / 2
        );
        assert_eq!(jittered_pause(1 << 63), RULES_READ_INTERVAL);
    }
}
