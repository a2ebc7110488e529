//! How a node learns of the rules of its group: every few seconds it brings those it knows and those its registry keeps
//! together, which costs a message only where they differ.

use serde_json::Value;
use spurline_cache::RuleSet;
use spurline_config::Fault;
use spurline_group::{Book, Registry};
use spurline_node::Node;
use spurline_types::{Error, ErrorKind};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// How long between two looks, on average; half as long to half as long again, so that nodes that were started together
/// do not ask together.
const LOOK: Duration = Duration::from_secs(5);

/// The registry is asked while this is kept; a question under way ends by its own deadline.
pub struct Following {
    _open: mpsc::Sender<()>,
}

/// Has a node go by the rules that its registry keeps: those of now when this returns, those of later as they come.
/// `None` where the registry keeps none.
///
/// # Errors
/// When there can be no thread.
pub fn start(node: &Arc<Node>, registry: &Arc<dyn Registry>) -> Result<Option<Following>, Fault> {
    let Some(book) = registry.book(spurline_cache::merge_rules) else { return Ok(None) };
    let mut said = say(exchange(node, book.as_ref()), false);
    let (open, ended) = mpsc::channel();
    let node = Arc::downgrade(node);
    let run = move || {
        let draw = RandomState::new();
        for look in 0u64.. {
            if ended.recv_timeout(jittered(draw.hash_one(look))) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let Some(node) = node.upgrade() else { return };
            said = say(exchange(&node, book.as_ref()), said);
        }
    };
    let thread = std::thread::Builder::new().name("rules".into()).spawn(run);
    thread.map_err(|e| Error::io("a thread for the rules of the group", &e))?;
    Ok(Some(Following { _open: open }))
}

/// [`LOOK`], shorter or longer by a drawn number.
fn jittered(drawn: u64) -> Duration {
    LOOK / 2 + LOOK.mul_f64((drawn >> 11) as f64 / (1u64 << 53) as f64)
}

fn exchange(node: &Node, book: &dyn Book) -> Result<(), Error> {
    let own = node.rules();
    let known = if own.revision == 0 { Value::Null } else { own.to_json() };
    let kept = book.exchange(&known)?;
    if kept != known {
        node.take_rules(&RuleSet::from_json(&kept)?);
    }
    Ok(())
}

/// Says why the rules can't be had, once. That the registry is gone whoever follows it says.
fn say(asked: Result<(), Error>, said: bool) -> bool {
    match asked {
        Ok(()) => false,
        Err(error) if error.kind() == ErrorKind::Unavailable => said,
        Err(error) => {
            if !said {
                tracing::warn!("the rules of the group can't be had: {error}; going on with those known");
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
        assert!(jittered(0) == LOOK / 2 && jittered(u64::MAX) <= LOOK * 3 / 2);
        assert_eq!(jittered(1 << 63), LOOK);
    }
}
