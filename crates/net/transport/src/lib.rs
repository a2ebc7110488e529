//! The interface of a data transport: channels and connectors for readers, services and responders for nodes, and the pools of
//! channels to a peer. Knows no socket and no verbs.
//!
//! A request names an operation and a region of the reader's memory, where the answer's payload lands. A request can therefore be
//! repeated on another channel, of another transport, when the first fails.
#![forbid(unsafe_code)]

mod channel;
mod channel_lease;
mod channel_set;
#[cfg(feature = "conformance")]
pub mod conformance;
mod connection_slots;
mod demand_pool;
mod frames;
mod path_liveness;
mod path_speed;
mod path_state;
mod peer_reach;
mod proof_gate;
mod rail_pairs;
mod rail_pool;
mod service;
mod worker_pool;

pub use channel::{
    CallAnswer, CallError, Channel, ChannelBreaker, ConnectionEndpoints, Connector, TransportKind, call_decoded,
    first_handshake, perform_handshake,
};
pub use channel_lease::{BegunCall, ChannelLease};
pub use channel_set::PathEnds;
pub use connection_slots::{AdmissionGate, ConnectionSlots, SlotHolder, SlotOffer};
pub use demand_pool::{DemandConfig, DemandPool, OverduePeer};
pub use frames::{ByteStream, FrameResponder, FrameSink, receive_answer};
pub use path_speed::SpeedCheck;
pub use path_state::{PathPhase, PathTiming};
pub use peer_reach::PeerReach;
pub use proof_gate::prove_token;
pub use rail_pairs::{RailPair, pair_rails};
pub use rail_pool::{PathSpec, PathView, PathWake, QuietPath, RailLoads, RailPool};
pub use service::{AnswerState, ConnState, NextStep, Responder, Service, dispatch_request};
pub use worker_pool::{PooledServer, ServeOutcome, WorkerPool};
