//! Work on many files, asked of a coordinator: the gRPC face of whoever does it. It knows nothing of jobs but that they
//! are asked in JSON.

use crate::coordinator::{channel, told};
use crate::pb::jobs_client::JobsClient;
use crate::pb::jobs_server;
use crate::{ANSWER, pb, runtime};
use serde_json::Value;
use spurline_trust::Trust;
use spurline_types::HostPort;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tonic::{Code, Request, Response, Status};

/// A job may name a hundred thousand files.
const MAX_REQUEST: usize = 16 << 20;
/// A thousand jobs, each with a thousand failed files.
const MAX_REPLY: usize = 256 << 20;

/// Does the jobs of the groups.
pub trait Jobs: Send + Sync + 'static {
    /// Answers a request about the jobs of `group`; returns at once.
    ///
    /// # Errors
    /// When the request makes no sense, or names no job.
    fn ask(&self, group: &str, request: &Value) -> Result<Value>;
}

/// Who does the jobs, once that is known.
pub(crate) type Worker = Arc<OnceLock<Arc<dyn Jobs>>>;

pub(crate) struct Service(pub Worker);

impl Service {
    pub(crate) fn server(self) -> jobs_server::JobsServer<Self> {
        jobs_server::JobsServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

#[tonic::async_trait]
impl jobs_server::Jobs for Service {
    async fn ask(&self, request: Request<pb::JobsRequest>) -> Result<Response<pb::JobsReply>, Status> {
        let pb::JobsRequest { group, json } = request.into_inner();
        let request = serde_json::from_str(&json).map_err(|e| Status::invalid_argument(format!("no JSON: {e}")))?;
        let Some(worker) = self.0.get().cloned() else {
            return Err(Status::unavailable("the coordinator has only just begun"));
        };
        let answer = tokio::task::spawn_blocking(move || worker.ask(&group, &request)).await;
        match answer.map_err(|e| Status::internal(e.to_string()))? {
            Ok(answer) => Ok(Response::new(pb::JobsReply { json: answer.to_string() })),
            Err(error) => {
                let code = match error.kind() {
                    ErrorKind::NotFound => Code::NotFound,
                    ErrorKind::Invalid => Code::AlreadyExists,
                    _ => Code::Unavailable,
                };
                Err(Status::new(code, error.message()))
            }
        }
    }
}

/// Asks the first of these coordinators that answers about the jobs of `group`, shown what `trust` has; where that knows
/// no such job, the next ones as well.
///
/// # Errors
/// What it answers, or that none does; `Unavailable` as long as one that may know the job does not answer.
pub fn ask_jobs(
    coordinators: &[HostPort],
    group: &str,
    trust: &Arc<Trust>,
    request: &Value,
    limit: Duration,
) -> Result<Value> {
    let runtime = runtime("jobs")?;
    let json = request.to_string();
    if json.len() > MAX_REQUEST - 1024 {
        let why = format!("the job's list has {} bytes, at most {MAX_REQUEST} are taken: split it", json.len());
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    let mut silent = None;
    let mut last = Error::new(ErrorKind::Unavailable, "no coordinator is named");
    for at in coordinators {
        let ask = async {
            let mut client = JobsClient::new(channel(at, trust)?).max_decoding_message_size(MAX_REPLY);
            let mut request = Request::new(pb::JobsRequest { group: group.to_owned(), json: json.clone() });
            request.set_timeout(limit.min(ANSWER * 2));
            client.ask(request).await.map_err(|status| match status.code() {
                Code::NotFound => Error::new(ErrorKind::NotFound, status.message()),
                _ => told(&format!("coordinator {at}"), &status),
            })
        };
        match runtime.block_on(ask) {
            Ok(reply) => {
                return serde_json::from_str(&reply.into_inner().json)
                    .map_err(|e| Error::new(ErrorKind::Protocol, format!("coordinator {at} answered no JSON: {e}")));
            }
            Err(error) if error.kind() == ErrorKind::Unavailable => silent = Some(error),
            Err(error) if error.kind() == ErrorKind::NotFound => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(silent.unwrap_or(last))
}
