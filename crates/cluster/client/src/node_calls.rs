//! Calls of one node to another, by the node's name. Each call is sent once, over one path. Knows neither the calls nor the answers:
//! both are bytes here.

use crate::members::GroupMembers;
use crate::peer::landing_address;
use spurline_proto::{MAX_STAGE_CALL, MAX_WRITE, MIN_STAGE_VERSION, NodeRequest, StageRequest, WelcomeAnswer};
use spurline_transport::{CallError, ChannelLease};
use spurline_types::{Error, ErrorKind, Member, Result};
use std::sync::Arc;
use std::time::Instant;

/// The answer of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeReply {
    /// The answer.
    pub body: Vec<u8>,
    /// Its bytes, no more than the caller had room for.
    pub payload: Vec<u8>,
}

/// Why a call has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeCallFailure {
    /// The node has not got the call: it is no member, can't be reached, or is of an older release.
    NotSent(Error),
    /// The node may have executed the call.
    Lost(Error),
    /// The node's own error.
    Answered(Error),
}

impl NodeCallFailure {
    /// The error in any case.
    pub fn error(&self) -> &Error {
        match self {
            NodeCallFailure::NotSent(error) | NodeCallFailure::Lost(error) | NodeCallFailure::Answered(error) => error,
        }
    }
}

/// The nodes of a group, to call.
pub struct NodeCalls {
    members: Arc<GroupMembers>,
}

impl NodeCalls {
    /// Calls to these nodes.
    pub fn new(members: Arc<GroupMembers>) -> Self {
        NodeCalls { members }
    }

    /// The nodes, the calling node included once the registry lists that.
    pub fn members(&self) -> Vec<Arc<Member>> {
        self.members.snapshot().members().to_vec()
    }

    /// Replaces the list of nodes. Running calls end as they would otherwise.
    pub fn set_members(&self, members: &[Arc<Member>]) {
        self.members.set_members(members);
    }

    /// Sends a call of at most [`MAX_STAGE_CALL`] bytes to the node of this name, and waits until `deadline` for the answer, whose
    /// payload has at most `room` bytes. The payload of the call has at most [`MAX_WRITE`] bytes, and not more than a block of that
    /// node. Each call in progress occupies a connection.
    ///
    /// # Errors
    /// By [`NodeCallFailure`]; a call or a payload that is too long is not sent. An answer with more than `room` bytes is lost.
    pub fn call(
        &self,
        node: &str,
        call: &[u8],
        payload: &[u8],
        room: usize,
        deadline: Instant,
    ) -> std::result::Result<NodeReply, NodeCallFailure> {
        check_lengths(call, payload).map_err(NodeCallFailure::NotSent)?;
        let view = self.members.snapshot();
        let Some(index) = view.members().iter().position(|member| member.name == node) else {
            let why = format!("node {node} is no member of the cache group");
            return Err(NodeCallFailure::NotSent(Error::new(ErrorKind::Unavailable, why)));
        };
        let peer = view.peer(index as u32);
        let mut reply = NodeReply { body: Vec::new(), payload: vec![0; room] };
        let near = landing_address(if payload.is_empty() { &reply.payload } else { payload });
        let mut failed: Option<NodeCallFailure> = None;
        let mut send = |lease: &mut ChannelLease<'_>, until: Instant| {
            // On another path the call would be a second one.
            if let Some(failure) = &failed {
                return Err(CallError::Answered(failure.error().clone()));
            }
            check_node(lease.welcome(), payload.len()).map_err(CallError::Answered)?;
            let request = NodeRequest::Stage(StageRequest { call, payload });
            let answer = lease.call(&request, &mut reply.body, &mut reply.payload, &mut |_| {}, until);
            answer.inspect_err(|error| failed = Some(failure_of(error)))
        };
        let answered = peer.attempt_once(Some(near), deadline, &mut send);
        match answered {
            Ok(answer) => {
                reply.payload.truncate(answer.payload_len);
                Ok(reply)
            }
            Err(error) => Err(failed.unwrap_or(NodeCallFailure::NotSent(error))),
        }
    }
}

/// The failure of a call that was sent.
fn failure_of(error: &CallError) -> NodeCallFailure {
    match error {
        CallError::Answered(error) => NodeCallFailure::Answered(error.clone()),
        CallError::Broken(error) => NodeCallFailure::Lost(error.clone()),
    }
}

/// Checks that a call fits in a frame.
///
/// # Errors
/// `Invalid`, with the length.
fn check_lengths(call: &[u8], payload: &[u8]) -> Result<()> {
    for (what, len, most) in [("call", call.len(), MAX_STAGE_CALL), ("payload", payload.len(), MAX_WRITE)] {
        if len > most {
            let why = format!("a {what} of {len} bytes to another node, at most {most} are possible");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
    }
    Ok(())
}

/// Checks that a node answers calls about staged files, and has a buffer for the payload.
///
/// # Errors
/// `Unsupported` for an older node, `Invalid` for a payload of more than a block.
fn check_node(welcome: &WelcomeAnswer, payload_len: usize) -> Result<()> {
    if welcome.version < MIN_STAGE_VERSION {
        let why = format!(
            "node {} speaks protocol version {}, and staged files need {MIN_STAGE_VERSION}: the node's release is older; upgrade \
             spurline on its host",
            welcome.node, welcome.version
        );
        return Err(Error::new(ErrorKind::Unsupported, why));
    }
    // The largest buffer of a node has the size of a block.
    if payload_len as u64 > welcome.block_size {
        let why = format!(
            "a payload of {payload_len} bytes is more than a block of node {}, which has {} bytes",
            welcome.node, welcome.block_size
        );
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    Ok(())
}
