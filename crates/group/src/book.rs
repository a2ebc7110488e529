//! What a whole group goes by, kept by its registry: of two texts the one of the later revision holds, so nodes can give
//! a registry back what it lost. It knows of a text its revision and nothing else.

use crate::pb::rules_client::RulesClient;
use crate::pb::rules_server;
use crate::{ANSWER, Limits, kept, pb};
use parking_lot::Mutex;
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tonic::{Request, Response, Status};

/// The longest text of a group.
pub(crate) const TEXT_MAX: usize = 256 << 10;

/// Keeps what a group goes by.
pub trait Book: Send + Sync {
    /// Has the registry keep `given` if its revision is later than that of what it keeps; `Null` only asks. Answers what
    /// it keeps then, `Null` for nothing.
    ///
    /// # Errors
    /// When the registry can't be reached or refuses, saying what was tried.
    fn exchange(&self, given: &Value) -> Result<Value>;
}

/// The revision of a text; 0 for none.
pub fn revision(text: &Value) -> u64 {
    text["revision"].as_u64().unwrap_or(0)
}

/// What a coordinator keeps, for each group, and in a file if it has one.
pub(crate) struct Books {
    kept: Mutex<BTreeMap<String, Value>>,
    file: Option<PathBuf>,
}

impl Books {
    /// # Errors
    /// When there is a file and it can't be read.
    pub(crate) fn open(file: Option<PathBuf>) -> Result<Self> {
        let understood = |text: &[u8]| serde_json::from_slice(text).map_err(|e| e.to_string());
        let of_before = file.as_deref().map(|file| kept::read(file, understood)).transpose()?.flatten();
        Ok(Books { kept: Mutex::new(of_before.unwrap_or_default()), file })
    }

    /// # Errors
    /// `Invalid` for what no group can have, `Unavailable` when it can't be kept.
    pub(crate) fn exchange(&self, group: &str, given: Value) -> Result<Value> {
        let mut kept = self.kept.lock();
        let now = kept.get(group).cloned().unwrap_or_default();
        if revision(&given) <= revision(&now) {
            return Ok(now);
        }
        let limits = Limits::default();
        if group.is_empty() || group.len() > limits.word || !kept.contains_key(group) && kept.len() >= limits.groups {
            let what = format!("a group with a name of {} bytes, beside {} others", group.len(), kept.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        kept.insert(group.to_owned(), given.clone());
        if let Err(error) = self.save(&kept) {
            kept.insert(group.to_owned(), now);
            return Err(error);
        }
        Ok(given)
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
        let pb::RulesRequest { group, json } = request.into_inner();
        if json.len() > TEXT_MAX {
            return Err(Status::invalid_argument(format!("{} bytes of rules, at most {TEXT_MAX}", json.len())));
        }
        let given = read(&json).map_err(|e| Status::invalid_argument(format!("no JSON: {e}")))?;
        let books = Arc::clone(&self.0);
        let answer = tokio::task::spawn_blocking(move || books.exchange(&group, given)).await;
        match answer.map_err(|e| Status::internal(e.to_string()))? {
            Ok(kept) => Ok(Response::new(pb::RulesReply { json: write(&kept) })),
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

/// What the coordinators of a group keep. They know nothing of each other: the first that answers decides which of two
/// texts of one revision holds, and all others are given what holds.
pub(crate) struct OfCoordinators {
    pub group: String,
    pub at: Arc<Vec<crate::coordinator::At>>,
    pub runtime: Arc<Runtime>,
}

impl Book for OfCoordinators {
    fn exchange(&self, given: &Value) -> Result<Value> {
        let (mut held, mut decided) = (given.clone(), false);
        let mut errors: Vec<Error> = Vec::new();
        for at in self.at.iter() {
            let mut client = RulesClient::new(at.channel.clone());
            let mut request = Request::new(pb::RulesRequest { group: self.group.clone(), json: write(&held) });
            request.set_timeout(ANSWER);
            let asked = async { tokio::time::timeout(ANSWER, client.exchange(request)).await };
            let json = match self.runtime.block_on(asked) {
                Ok(Ok(reply)) => reply.into_inner().json,
                Ok(Err(status)) => {
                    errors.push(crate::coordinator::told(&at.address, &status));
                    continue;
                }
                Err(_) => {
                    let text = format!("{}: no answer within {} s", at.address, ANSWER.as_secs());
                    errors.push(Error::new(ErrorKind::Unavailable, text));
                    continue;
                }
            };
            let kept = read(&json).map_err(|e| {
                Error::new(ErrorKind::Protocol, format!("coordinator {} answered no JSON: {e}", at.address))
            })?;
            if !decided || revision(&kept) > revision(&held) {
                held = kept;
            }
            decided = true;
        }
        if decided {
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
        let books = Books::open(Some(file.clone())).unwrap();
        let text = |revision: u64, rule: &str| json!({"revision": revision, "rules": [rule]});
        assert_eq!(books.exchange("g", Value::Null).unwrap(), Value::Null);
        assert_eq!(books.exchange("g", text(3, "a")).unwrap(), text(3, "a"));
        // Not later: another one of that revision was faster.
        assert_eq!(books.exchange("g", text(3, "b")).unwrap(), text(3, "a"));
        assert_eq!(books.exchange("g", text(2, "b")).unwrap(), text(3, "a"));
        assert_eq!(books.exchange("other", Value::Null).unwrap(), Value::Null);
        assert!(books.exchange(&"g".repeat(10_000), text(1, "a")).is_err());
        drop(books);
        let books = Books::open(Some(file.clone())).unwrap();
        assert_eq!(books.exchange("g", Value::Null).unwrap(), text(3, "a"));
        drop(books);
        std::fs::write(&file, "{").unwrap();
        let aside = dir.path().join("nodes.rules.spoilt");
        let books = Books::open(Some(file)).unwrap();
        assert_eq!(books.exchange("g", Value::Null).unwrap(), Value::Null);
        // A node gives it back; what a person may want to look at is there still.
        assert_eq!(books.exchange("g", text(3, "a")).unwrap(), text(3, "a"));
        assert_eq!(std::fs::read(aside).unwrap(), b"{");
    }

    #[test]
    fn what_can_not_be_kept_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("gone/nodes.rules");
        let books = Books::open(Some(file)).unwrap();
        let error = books.exchange("g", json!({"revision": 1})).unwrap_err();
        assert!(error.message().contains("gone/nodes.rules"), "{error}");
        assert_eq!(books.exchange("g", Value::Null).unwrap(), Value::Null);
    }
}
