//! Stores of a group's folder rules. Two versions are merged, so that nodes can restore what a registry lost; the
//! merge function is passed in, the rules are opaque here.

use crate::coordinator_client::{CoordinatorHandle, status_error};
use crate::pb::rules_client::RulesClient;
use crate::pb::rules_server;
use crate::{ANSWER_TIMEOUT, TableLimits, pb, state_file};
use parking_lot::{Mutex, RwLock};
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tonic::{Request, Response, Status};

/// Most bytes of a group's rules.
pub(crate) const TEXT_MAX: usize = 256 << 10;

/// Merges two versions, `Null` being the empty one. Associative, commutative and idempotent.
pub type MergeRules = fn(&Value, &Value) -> Result<Value>;

/// A store of a group's rules.
pub trait RuleStore: Send + Sync {
    /// Merges `given` with the stored version and returns the result; `Null` only reads. Needs little or no traffic
    /// when `given` is stored already.
    ///
    /// # Errors
    /// When the registry can't be reached or refuses, with what was tried.
    fn exchange_rules(&self, given: &Value) -> Result<Value>;
}

/// The later revision; of equal revisions the greater text.
///
/// # Errors
/// Never.
pub fn later_revision(one: &Value, two: &Value) -> Result<Value> {
    let order = |text: &Value| (text["revision"].as_u64(), text.to_string());
    Ok(if order(one) >= order(two) { one.clone() } else { two.clone() })
}

/// Identifies a version; empty for none.
pub(crate) fn rules_digest(text: &Value) -> String {
    if text.is_null() {
        String::new()
    } else {
        format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.to_string().as_bytes()))
    }
}

/// A coordinator's rules of each group, with an optional state file.
pub(crate) struct RuleTexts {
    texts: Mutex<BTreeMap<String, Value>>,
    /// Digests of the stored versions: read with every announcement, and never locked while a file is written.
    digests: RwLock<BTreeMap<String, String>>,
    file: Option<PathBuf>,
    merge: MergeRules,
}

impl RuleTexts {
    /// # Errors
    /// When there is a file and it can't be read.
    pub(crate) fn open(file: Option<PathBuf>, merge: MergeRules) -> Result<Self> {
        let understood = |text: &[u8]| {
            let texts: BTreeMap<String, Value> = serde_json::from_slice(text).map_err(|e| e.to_string())?;
            // In this release's form, so that its digest is the one that clients know.
            let same = |(group, text)| Ok((group, merge(&text, &Value::Null).map_err(|e| e.to_string())?));
            texts.into_iter().map(same).collect::<Result<BTreeMap<String, Value>, String>>()
        };
        let kept = file
            .as_deref()
            .map(|file| state_file::read_file(file, understood))
            .transpose()?
            .flatten()
            .unwrap_or_default();
        let digests = kept.iter().map(|(group, text)| (group.clone(), rules_digest(text))).collect();
        Ok(RuleTexts { texts: Mutex::new(kept), digests: RwLock::new(digests), file, merge })
    }

    /// The digest of a group's rules.
    pub(crate) fn group_digest(&self, group: &str) -> String {
        self.digests.read().get(group).cloned().unwrap_or_default()
    }

    /// # Errors
    /// `Invalid` for an invalid group, `Unavailable` when the rules can't be stored.
    pub(crate) fn exchange_for(&self, group: &str, given: &Value) -> Result<Value> {
        let mut kept = self.texts.lock();
        let now = kept.get(group).cloned().unwrap_or_default();
        let merged = (self.merge)(&now, given)?;
        if merged == now {
            return Ok(now);
        }
        let limits = TableLimits::default();
        if group.is_empty() || group.len() > limits.word || !kept.contains_key(group) && kept.len() >= limits.groups {
            let what = format!("a group with a name of {} bytes, beside {} others", group.len(), kept.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        kept.insert(group.to_owned(), merged.clone());
        if let Err(error) = self.save_file(&kept) {
            kept.insert(group.to_owned(), now);
            return Err(error);
        }
        self.digests.write().insert(group.to_owned(), rules_digest(&merged));
        Ok(merged)
    }

    fn save_file(&self, all: &BTreeMap<String, Value>) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let text = serde_json::to_vec_pretty(all).unwrap_or_default();
        state_file::replace_file(file, "rules-next", &text).map_err(|e| {
            let what = format!("the coordinator can't keep it in {}: {e}", file.display());
            Error::new(ErrorKind::Unavailable, what)
        })
    }
}

pub(crate) struct RulesService(pub Arc<RuleTexts>);

#[tonic::async_trait]
impl rules_server::Rules for RulesService {
    async fn exchange(&self, request: Request<pb::RulesRequest>) -> Result<Response<pb::RulesReply>, Status> {
        let pb::RulesRequest { group, json, known } = request.into_inner();
        if json.len() > TEXT_MAX {
            return Err(Status::invalid_argument(format!("{} bytes of rules, at most {TEXT_MAX}", json.len())));
        }
        let given = parse_rules(&json).map_err(|e| Status::invalid_argument(format!("no JSON: {e}")))?;
        let books = Arc::clone(&self.0);
        let answer = tokio::task::spawn_blocking(move || books.exchange_for(&group, &given)).await;
        match answer.map_err(|e| Status::internal(e.to_string()))? {
            Ok(kept) if rules_digest(&kept) == known => {
                Ok(Response::new(pb::RulesReply { json: String::new(), known: true }))
            }
            Ok(kept) => Ok(Response::new(pb::RulesReply { json: format_rules(&kept), known: false })),
            Err(error) if error.kind() == ErrorKind::Invalid => Err(Status::invalid_argument(error.message())),
            Err(error) => Err(Status::unavailable(error.message())),
        }
    }
}

pub(crate) fn parse_rules(json: &str) -> serde_json::Result<Value> {
    if json.is_empty() { Ok(Value::Null) } else { serde_json::from_str(json) }
}

pub(crate) fn format_rules(text: &Value) -> String {
    if text.is_null() { String::new() } else { text.to_string() }
}

/// Rules on coordinators that share no data: a version missing on one is sent to it.
pub(crate) struct CoordinatorRuleStore {
    pub group: String,
    pub merge: MergeRules,
    pub coordinators: Arc<Vec<CoordinatorHandle>>,
    pub runtime: Arc<Runtime>,
}

impl CoordinatorRuleStore {
    /// Sends `given` to one coordinator, unless it is `Null`; returns the stored version, `None` when that is
    /// `known`.
    fn send_exchange(&self, at: &CoordinatorHandle, given: &Value, known: &str) -> Result<Option<Value>> {
        let mut client = RulesClient::new(at.channel.clone());
        let message =
            pb::RulesRequest { group: self.group.clone(), json: format_rules(given), known: known.to_owned() };
        let mut request = Request::new(message);
        request.set_timeout(ANSWER_TIMEOUT);
        let asked = async { tokio::time::timeout(ANSWER_TIMEOUT, client.exchange(request)).await };
        let reply = match self.runtime.block_on(asked) {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) => return Err(status_error(&at.address, &status)),
            Err(_) => {
                let text = format!("{}: no answer within {} s", at.address, ANSWER_TIMEOUT.as_secs());
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
        };
        if reply.known {
            at.record_digest(known.to_owned());
            return Ok(None);
        }
        let kept = parse_rules(&reply.json).map_err(|e| {
            Error::new(ErrorKind::Protocol, format!("coordinator {} answered no JSON: {e}", at.address))
        })?;
        at.record_digest(rules_digest(&kept));
        Ok(Some(kept))
    }

    /// Merges `held` with one coordinator's version and stores the result there.
    fn bring_together(&self, at: &CoordinatorHandle, held: &Value) -> Result<Value> {
        let known = rules_digest(held);
        // The coordinator reports its digest with every announcement, so an unchanged version needs no request.
        if at.has_digest(&known) {
            return Ok(held.clone());
        }
        let Some(kept) = self.send_exchange(at, &Value::Null, &known)? else { return Ok(held.clone()) };
        let merged = (self.merge)(held, &kept)?;
        if merged == kept {
            return Ok(merged);
        }
        match self.send_exchange(at, &merged, &rules_digest(&merged))? {
            None => Ok(merged),
            // Another client was faster; the result contains both versions.
            Some(kept) => Ok(kept),
        }
    }
}

impl RuleStore for CoordinatorRuleStore {
    fn exchange_rules(&self, given: &Value) -> Result<Value> {
        let mut held = given.clone();
        let mut errors: Vec<Error> = Vec::new();
        let mut answered: Vec<&CoordinatorHandle> = Vec::new();
        for at in self.coordinators.iter() {
            match self.bring_together(at, &held) {
                Ok(kept) => {
                    held = kept;
                    answered.push(at);
                }
                Err(error) => errors.push(error),
            }
        }
        // Send later findings to the coordinators that answered first; an unreachable one gets them another time.
        let all = rules_digest(&held);
        for at in answered.iter().filter(|at| !at.has_digest(&all)) {
            if let Ok(kept) = self.bring_together(at, &held) {
                held = kept;
            }
        }
        if !answered.is_empty() {
            return Ok(held);
        }
        // Unless all refuse for the same reason, one may answer another time.
        let kind = errors.first().map_or(ErrorKind::Unavailable, Error::kind);
        let kind = if errors.iter().all(|error| error.kind() == kind) { kind } else { ErrorKind::Unavailable };
        let words: Vec<&str> = errors.iter().map(Error::message).collect();
        Err(Error::new(kind, words.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_later_revision_holds_over_a_restart_and_a_spoilt_file_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nodes.rules");
        let books = RuleTexts::open(Some(file.clone()), later_revision).unwrap();
        let text = |revision: u64, rule: &str| json!({"revision": revision, "rules": [rule]});
        assert_eq!(books.exchange_for("g", &Value::Null).unwrap(), Value::Null);
        assert_eq!(books.exchange_for("g", &text(3, "a")).unwrap(), text(3, "a"));
        let known = books.group_digest("g");
        assert_eq!((known.len(), &known), (32, &rules_digest(&text(3, "a"))));
        assert_eq!(books.exchange_for("g", &text(3, "A")).unwrap(), text(3, "a"));
        assert_eq!(books.exchange_for("g", &text(2, "b")).unwrap(), text(3, "a"));
        assert_eq!(books.exchange_for("other", &Value::Null).unwrap(), Value::Null);
        assert!(books.exchange_for(&"g".repeat(10_000), &text(1, "a")).is_err());
        assert_eq!((books.group_digest("g"), books.group_digest("other").as_str()), (known.clone(), ""));
        drop(books);
        let books = RuleTexts::open(Some(file.clone()), later_revision).unwrap();
        assert_eq!((books.exchange_for("g", &Value::Null).unwrap(), books.group_digest("g")), (text(3, "a"), known));
        drop(books);
        std::fs::write(&file, "{").unwrap();
        let aside = dir.path().join("nodes.rules.spoilt");
        let books = RuleTexts::open(Some(file), later_revision).unwrap();
        assert_eq!(books.exchange_for("g", &Value::Null).unwrap(), Value::Null);
        // A node restores it; the damaged file stays for inspection.
        assert_eq!(books.exchange_for("g", &text(3, "a")).unwrap(), text(3, "a"));
        assert_eq!(std::fs::read(aside).unwrap(), b"{");
    }

    #[test]
    fn what_can_not_be_kept_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("gone/nodes.rules");
        let books = RuleTexts::open(Some(file), later_revision).unwrap();
        let error = books.exchange_for("g", &json!({"revision": 1})).unwrap_err();
        assert!(error.message().contains("gone/nodes.rules"), "{error}");
        assert_eq!(books.exchange_for("g", &Value::Null).unwrap(), Value::Null);
    }
}
