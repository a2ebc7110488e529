//! What a whole group goes by, kept by its registry: of two texts something comes that has what both say, so that nodes can
//! give a registry back what it lost, and what was said to two of them is lost by none. How, it is told: it knows nothing of
//! what a text says.

use crate::coordinator::{At, told};
use crate::pb::rules_client::RulesClient;
use crate::pb::rules_server;
use crate::{ANSWER, Limits, kept, pb};
use parking_lot::{Mutex, RwLock};
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tonic::{Request, Response, Status};

/// The longest text of a group.
pub(crate) const TEXT_MAX: usize = 256 << 10;

/// Brings two texts together, `Null` being one that says nothing. Whatever the order in which many are brought together, the
/// same comes of them; of a text and one that it came of, the text itself.
pub type Merge = fn(&Value, &Value) -> Result<Value>;

/// Keeps what a group goes by.
pub trait Book: Send + Sync {
    /// Brings `given` and what the registry keeps together; `Null` only asks. Answers what it keeps then, `Null` for nothing.
    /// Where it keeps `given` already, as long as all is at rest, little or nothing is asked.
    ///
    /// # Errors
    /// When the registry can't be reached or refuses, saying what was tried.
    fn exchange(&self, given: &Value) -> Result<Value>;
}

/// Of two texts the one of the later revision; of one revision the one that comes later by its letters.
///
/// # Errors
/// Never.
pub fn later(one: &Value, two: &Value) -> Result<Value> {
    let order = |text: &Value| (text["revision"].as_u64(), text.to_string());
    Ok(if order(one) >= order(two) { one.clone() } else { two.clone() })
}

/// Tells a text from others; empty for none.
pub(crate) fn digest(text: &Value) -> String {
    if text.is_null() {
        String::new()
    } else {
        format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.to_string().as_bytes()))
    }
}

/// What a coordinator keeps, for each group, and in a file if it has one.
pub(crate) struct Books {
    kept: Mutex<BTreeMap<String, Value>>,
    /// Of what is kept: asked for by every node all the time, and never held while a file is written.
    digests: RwLock<BTreeMap<String, String>>,
    file: Option<PathBuf>,
    merge: Merge,
}

impl Books {
    /// # Errors
    /// When there is a file and it can't be read.
    pub(crate) fn open(file: Option<PathBuf>, merge: Merge) -> Result<Self> {
        let understood = |text: &[u8]| {
            let texts: BTreeMap<String, Value> = serde_json::from_slice(text).map_err(|e| e.to_string())?;
            // As this release writes it, so that it has the digest that others know it by.
            let same = |(group, text)| Ok((group, merge(&text, &Value::Null).map_err(|e| e.to_string())?));
            texts.into_iter().map(same).collect::<Result<BTreeMap<String, Value>, String>>()
        };
        let kept = file.as_deref().map(|file| kept::read(file, understood)).transpose()?.flatten().unwrap_or_default();
        let digests = kept.iter().map(|(group, text)| (group.clone(), digest(text))).collect();
        Ok(Books { kept: Mutex::new(kept), digests: RwLock::new(digests), file, merge })
    }

    /// The digest of what is kept for a group.
    pub(crate) fn digest(&self, group: &str) -> String {
        self.digests.read().get(group).cloned().unwrap_or_default()
    }

    /// # Errors
    /// `Invalid` for what no group can have, `Unavailable` when it can't be kept.
    pub(crate) fn exchange(&self, group: &str, given: &Value) -> Result<Value> {
        let mut kept = self.kept.lock();
        let now = kept.get(group).cloned().unwrap_or_default();
        let merged = (self.merge)(&now, given)?;
        if merged == now {
            return Ok(now);
        }
        let limits = Limits::default();
        if group.is_empty() || group.len() > limits.word || !kept.contains_key(group) && kept.len() >= limits.groups {
            let what = format!("a group with a name of {} bytes, beside {} others", group.len(), kept.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        kept.insert(group.to_owned(), merged.clone());
        if let Err(error) = self.save(&kept) {
            kept.insert(group.to_owned(), now);
            return Err(error);
        }
        self.digests.write().insert(group.to_owned(), digest(&merged));
        Ok(merged)
    }

    fn save(&self, all: &BTreeMap<String, Value>) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let text = serde_json::to_vec_pretty(all).unwrap_or_default();
        kept::write(file, "rules-next", &text).map_err(|e| {
            let what = format!("the coordinator can't keep it in {}: {e}", file.display());
            Error::new(ErrorKind::Unavailable, what)
        })
    }
}

pub(crate) struct Service(pub Arc<Books>);

#[tonic::async_trait]
impl rules_server::Rules for Service {
    async fn exchange(&self, request: Request<pb::RulesRequest>) -> Result<Response<pb::RulesReply>, Status> {
        let pb::RulesRequest { group, json, known } = request.into_inner();
        if json.len() > TEXT_MAX {
            return Err(Status::invalid_argument(format!("{} bytes of rules, at most {TEXT_MAX}", json.len())));
        }
        let given = read(&json).map_err(|e| Status::invalid_argument(format!("no JSON: {e}")))?;
        let books = Arc::clone(&self.0);
        let answer = tokio::task::spawn_blocking(move || books.exchange(&group, &given)).await;
        match answer.map_err(|e| Status::internal(e.to_string()))? {
            Ok(kept) if digest(&kept) == known => {
                Ok(Response::new(pb::RulesReply { json: String::new(), known: true }))
            }
            Ok(kept) => Ok(Response::new(pb::RulesReply { json: write(&kept), known: false })),
            Err(error) if error.kind() == ErrorKind::Invalid => Err(Status::invalid_argument(error.message())),
            Err(error) => Err(Status::unavailable(error.message())),
        }
    }
}

pub(crate) fn read(json: &str) -> serde_json::Result<Value> {
    if json.is_empty() { Ok(Value::Null) } else { serde_json::from_str(json) }
}

pub(crate) fn write(text: &Value) -> String {
    if text.is_null() { String::new() } else { text.to_string() }
}

/// What the coordinators of a group keep. They know nothing of each other: what one has and another has not, the latter is
/// given.
pub(crate) struct OfCoordinators {
    pub group: String,
    pub merge: Merge,
    pub at: Arc<Vec<At>>,
    pub runtime: Arc<Runtime>,
}

impl OfCoordinators {
    /// Gives one of them `given`, unless that is `Null`; what it keeps then, `None` when that is `known`.
    fn ask(&self, at: &At, given: &Value, known: &str) -> Result<Option<Value>> {
        let mut client = RulesClient::new(at.channel.clone());
        let message = pb::RulesRequest { group: self.group.clone(), json: write(given), known: known.to_owned() };
        let mut request = Request::new(message);
        request.set_timeout(ANSWER);
        let asked = async { tokio::time::timeout(ANSWER, client.exchange(request)).await };
        let reply = match self.runtime.block_on(asked) {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) => return Err(told(&at.address, &status)),
            Err(_) => {
                let text = format!("{}: no answer within {} s", at.address, ANSWER.as_secs());
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
        };
        if reply.known {
            at.keeps(known.to_owned());
            return Ok(None);
        }
        let kept = read(&reply.json).map_err(|e| {
            Error::new(ErrorKind::Protocol, format!("coordinator {} answered no JSON: {e}", at.address))
        })?;
        at.keeps(digest(&kept));
        Ok(Some(kept))
    }

    /// What comes of `held` and what one of them keeps, which keeps that as well then.
    fn bring_together(&self, at: &At, held: &Value) -> Result<Value> {
        let known = digest(held);
        // Not asked for the text where it is known: it says so whenever this process tells it that it is there.
        if at.said(&known) {
            return Ok(held.clone());
        }
        let Some(kept) = self.ask(at, &Value::Null, &known)? else { return Ok(held.clone()) };
        let merged = (self.merge)(held, &kept)?;
        if merged == kept {
            return Ok(merged);
        }
        match self.ask(at, &merged, &digest(&merged))? {
            None => Ok(merged),
            // Somebody was faster; what both said is in it.
            Some(kept) => Ok(kept),
        }
    }
}

impl Book for OfCoordinators {
    fn exchange(&self, given: &Value) -> Result<Value> {
        let mut held = given.clone();
        let mut errors: Vec<Error> = Vec::new();
        let mut answered: Vec<&At> = Vec::new();
        for at in self.at.iter() {
            match self.bring_together(at, &held) {
                Ok(kept) => {
                    held = kept;
                    answered.push(at);
                }
                Err(error) => errors.push(error),
            }
        }
        // Those asked first are given what others had; one that can't be reached now is given it another time.
        let all = digest(&held);
        for at in answered.iter().filter(|at| !at.said(&all)) {
            if let Ok(kept) = self.bring_together(at, &held) {
                held = kept;
            }
        }
        if !answered.is_empty() {
            return Ok(held);
        }
        // When not all refuse for the same reason, one of them may answer another time.
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
        let books = Books::open(Some(file.clone()), later).unwrap();
        let text = |revision: u64, rule: &str| json!({"revision": revision, "rules": [rule]});
        assert_eq!(books.exchange("g", &Value::Null).unwrap(), Value::Null);
        assert_eq!(books.exchange("g", &text(3, "a")).unwrap(), text(3, "a"));
        let known = books.digest("g");
        assert_eq!((known.len(), &known), (32, &digest(&text(3, "a"))));
        assert_eq!(books.exchange("g", &text(3, "A")).unwrap(), text(3, "a"));
        assert_eq!(books.exchange("g", &text(2, "b")).unwrap(), text(3, "a"));
        assert_eq!(books.exchange("other", &Value::Null).unwrap(), Value::Null);
        assert!(books.exchange(&"g".repeat(10_000), &text(1, "a")).is_err());
        assert_eq!((books.digest("g"), books.digest("other").as_str()), (known.clone(), ""));
        drop(books);
        let books = Books::open(Some(file.clone()), later).unwrap();
        assert_eq!((books.exchange("g", &Value::Null).unwrap(), books.digest("g")), (text(3, "a"), known));
        drop(books);
        std::fs::write(&file, "{").unwrap();
        let aside = dir.path().join("nodes.rules.spoilt");
        let books = Books::open(Some(file), later).unwrap();
        assert_eq!(books.exchange("g", &Value::Null).unwrap(), Value::Null);
        // A node gives it back; what a person may want to look at is there still.
        assert_eq!(books.exchange("g", &text(3, "a")).unwrap(), text(3, "a"));
        assert_eq!(std::fs::read(aside).unwrap(), b"{");
    }

    #[test]
    fn what_can_not_be_kept_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("gone/nodes.rules");
        let books = Books::open(Some(file), later).unwrap();
        let error = books.exchange("g", &json!({"revision": 1})).unwrap_err();
        assert!(error.message().contains("gone/nodes.rules"), "{error}");
        assert_eq!(books.exchange("g", &Value::Null).unwrap(), Value::Null);
    }
}
