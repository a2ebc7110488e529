//! The gRPC service for jobs on a coordinator, and the client. Requests and answers are opaque JSON here.

use crate::coordinator_client::{lazy_channel, status_error};
use crate::pb::jobs_client::JobsClient;
use crate::pb::jobs_server;
use crate::{ANSWER_TIMEOUT, pb, small_runtime};
use serde_json::Value;
use spurline_trust::Trust;
use spurline_types::HostPort;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tonic::{Code, Request, Response, Status};

/// A job may list a hundred thousand files.
const MAX_REQUEST: usize = 16 << 20;
/// A thousand jobs, each with a thousand failed files.
const MAX_REPLY: usize = 256 << 20;

/// Runs the jobs of the groups.
pub trait JobHandler: Send + Sync + 'static {
    /// Answers a request about the jobs of `group`; returns at once.
    ///
    /// # Errors
    /// When the request is invalid, or names an unknown job.
    fn handle_request(&self, group: &str, request: &Value) -> Result<Value>;
}

/// The job handler, once set.
pub(crate) type JobHandlerCell = Arc<OnceLock<Arc<dyn JobHandler>>>;

pub(crate) struct JobsService(pub JobHandlerCell);

impl JobsService {
    pub(crate) fn into_server(self) -> jobs_server::JobsServer<Self> {
        jobs_server::JobsServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

#[tonic::async_trait]
impl jobs_server::Jobs for JobsService {
    async fn ask(&self, request: Request<pb::JobsRequest>) -> Result<Response<pb::JobsReply>, Status> {
        let pb::JobsRequest { group, json } = request.into_inner();
        let request = serde_json::from_str(&json).map_err(|e| Status::invalid_argument(format!("no JSON: {e}")))?;
        let Some(worker) = self.0.get().cloned() else {
            return Err(Status::unavailable("the coordinator is starting; try again"));
        };
        let answer = tokio::task::spawn_blocking(move || worker.handle_request(&group, &request)).await;
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

/// Sends a request about the jobs of `group` to a coordinator.
///
/// # Errors
/// The coordinator's error; `Unavailable` without an answer.
pub fn request_jobs(at: &HostPort, group: &str, trust: &Arc<Trust>, request: &Value, limit: Duration) -> Result<Value> {
    let runtime = small_runtime("jobs")?;
    let json = request.to_string();
    if json.len() > MAX_REQUEST - 1024 {
        let why = format!("the job's list has {} bytes, at most {MAX_REQUEST} are possible: split it", json.len());
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    let call = async {
        let mut client = JobsClient::new(lazy_channel(at, trust)?).max_decoding_message_size(MAX_REPLY);
        let mut request = Request::new(pb::JobsRequest { group: group.to_owned(), json });
        request.set_timeout(limit.min(ANSWER_TIMEOUT * 2));
        client.ask(request).await.map_err(|status| match status.code() {
            Code::NotFound => Error::new(ErrorKind::NotFound, status.message()),
            _ => status_error(&format!("coordinator {at}"), &status),
        })
    };
    let reply = runtime.block_on(call)?.into_inner();
    serde_json::from_str(&reply.json)
        .map_err(|e| Error::new(ErrorKind::Protocol, format!("coordinator {at} answered no JSON: {e}")))
}
