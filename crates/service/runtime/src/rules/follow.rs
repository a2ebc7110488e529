//! How a node learns of the rules of its group: every few seconds it brings those it knows and those its registry keeps
//! together, which costs a message only where they differ. What it knows it keeps beside its blocks.

use super::state_file::Kept;
use serde_json::Value;
use spurline_cache::RuleSet;
use spurline_config::Fault;
use spurline_membership::{Registry, RuleStore};
use spurline_node::CacheNode;
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

/// Has a node go by the rules that its registry keeps: those of now when this returns, or those that were `kept` where it
/// can't be reached, and those of later as they come. `None` where the registry keeps none.
///
/// # Errors
/// When there can be no thread.
pub fn start(node: &Arc<CacheNode>, registry: &Arc<dyn Registry>, mut kept: Kept) -> Result<Option<Following>, Fault> {
    let Some(book) = registry.rule_store(spurline_cache::merge_rules) else { return Ok(None) };
    let mut said = say(exchange(node, book.as_ref(), &kept.rules()), false);
    kept.keep(&node.rules());
    let (open, ended) = mpsc::channel();
    let node = Arc::downgrade(node);
    let run = move || {
        let draw = RandomState::new();
        for look in 0u64.. {
            if ended.recv_timeout(jittered(draw.hash_one(look))) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let Some(node) = node.upgrade() else { return };
            said = say(exchange(&node, book.as_ref(), &node.rules()), said);
            kept.keep(&node.rules());
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

fn exchange(node: &CacheNode, book: &dyn RuleStore, own: &RuleSet) -> Result<(), Error> {
    let told = agreed(book, own);
    // Not before the registry was asked: what is of a rule that is not known is of none for good.
    node.take_rules(told.as_ref().unwrap_or(own));
    told.map(drop)
}

/// What the registry keeps together with `own`.
fn agreed(book: &dyn RuleStore, own: &RuleSet) -> Result<RuleSet, Error> {
    let known = if own.revision == 0 { Value::Null } else { own.to_json() };
    let kept = book.exchange_rules(&known)?;
    if kept == known { Ok(own.clone()) } else { RuleSet::from_json(&kept) }
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
    use spurline_cache::Rule;

    struct Said(Result<Value, Error>);

    impl RuleStore for Said {
        fn exchange_rules(&self, given: &Value) -> Result<Value, Error> {
            let kept = self.0.clone()?;
            spurline_cache::merge_rules(&kept, given)
        }
    }

    #[test]
    fn what_was_kept_is_told_the_registry_and_gives_way_to_what_is_newer() {
        let rule = |ttl, revision| Rule {
            url: "s3://b/x".into(),
            ttl_seconds: Some(ttl),
            number: 7,
            revision,
            ..Rule::default()
        };
        let set = |ttl, revision| RuleSet { revision, rules: vec![rule(ttl, revision)], ..RuleSet::default() };
        let (old, new) = (set(60, 3), set(5, 4));
        let newer = agreed(&Said(Ok(new.to_json())), &old).unwrap();
        assert_eq!((newer.revision, newer.rules[0].ttl_seconds), (4, Some(5)));
        assert_eq!(agreed(&Said(Ok(old.to_json())), &old).unwrap(), old);
        let gone = Error::new(ErrorKind::Unavailable, "gone");
        assert!(agreed(&Said(Err(gone)), &old).is_err());
    }

    #[test]
    fn nodes_look_at_different_times_and_about_as_often() {
        assert!(jittered(0) == LOOK / 2 && jittered(u64::MAX) <= LOOK * 3 / 2);
        assert_eq!(jittered(1 << 63), LOOK);
    }
}
