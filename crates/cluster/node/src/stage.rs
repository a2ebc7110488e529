//! Calls of other nodes about staged files. Owns the way to the handler; the calls and the answers are bytes here.

use crate::CacheNode;
use spurline_proto::StageRequest;
use spurline_transport::Responder;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// Answers the calls of other nodes about staged files. Called by many threads at once; may wait for disks and other machines.
pub trait StageHandler: Send + Sync {
    /// Executes a call with its bytes.
    ///
    /// # Errors
    /// Become the answer.
    fn serve(&self, call: &[u8], payload: &[u8]) -> Result<StageReply>;
}

/// The answer to a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StageReply {
    /// At most [`MAX_ANSWER_BODY`](spurline_proto::MAX_ANSWER_BODY) bytes.
    pub body: Vec<u8>,
    /// No more bytes than the caller has room for.
    pub payload: Vec<u8>,
}

impl CacheNode {
    /// Answers calls about staged files from now on. Only the first call has an effect.
    pub fn accept_stage(&self, handler: Arc<dyn StageHandler>) {
        // A call may be using the first handler.
        let _ = self.stage.set(handler);
    }

    pub(crate) fn serve_stage(&self, request: &StageRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        let handler = self.stage.get().ok_or_else(|| {
            let why = format!("node {} keeps no staged files: start it with --stage-size", self.name());
            Error::new(ErrorKind::Unsupported, why)
        })?;
        responder.before_wait();
        let StageReply { body, payload } = handler.serve(request.call, request.payload)?;
        responder.send_data(&body, &[&payload])
    }
}
