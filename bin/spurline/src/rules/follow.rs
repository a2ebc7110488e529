//! How a node learns of the rules of its group: it asks its registry every few seconds, and gives them back to one that
//! lost them.

use serde_json::Value;
use spurline_cache::RuleSet;
use spurline_config::Fault;
use spurline_group::{Book, Registry};
use spurline_node::Node;
use spurline_types::{Error, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// How often the registry is asked.
const ASK: Duration = Duration::from_secs(5);

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
    let Some(book) = registry.book() else { return Ok(None) };
    let mut said = say(exchange(node, book.as_ref()), false);
    let (open, ended) = mpsc::channel();
    let node = Arc::downgrade(node);
    let run = move || {
        while ended.recv_timeout(ASK) == Err(RecvTimeoutError::Timeout) {
            let Some(node) = node.upgrade() else { return };
            said = say(exchange(&node, book.as_ref()), said);
        }
    };
    let thread = std::thread::Builder::new().name("rules".into()).spawn(run);
    thread.map_err(|e| Error::io("a thread for the rules of the group", &e))?;
    Ok(Some(Following { _open: open }))
}

fn exchange(node: &Node, book: &dyn Book) -> Result<(), Error> {
    let own = node.rules();
    let kept = book.exchange(&if own.revision == 0 { Value::Null } else { own.to_json() })?;
    if !kept.is_null() {
        node.take_rules(RuleSet::from_json(&kept)?);
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
