//! The seam every data transport plugs into: channels and connectors on the reader's side, services and responders on
//! the node's, the pool of channels to one peer. It deliberately knows no socket and no verbs.
//!
//! A request names an operation and a region of the reader's own memory; the answer's payload lands there. So a
//! request can be sent again on another channel, of another transport, when the first one fails.
#![forbid(unsafe_code)]

mod channel;
#[cfg(feature = "conformance")]
pub mod conformance;
mod crew;
mod frames;
mod gate;
mod pairs;
mod path_pool;
mod path_speed;
mod path_state;
mod places;
mod pool;
mod service;
mod turns;

pub use channel::{
    Answer, Breaker, CallError, Channel, Connector, Endpoints, TransportKind, call_for, greet, greet_first,
};
pub use crew::{Crew, Crewed, End};
pub use frames::{ByteStream, FrameResponder, FrameSink, receive_answer};
pub use gate::prove;
pub use pairs::{Pair, pair};
pub use path_pool::{PathPool, PathSpec, PathView, Quiet, RailLoads, Wake};
pub use path_speed::SpeedCheck;
pub use path_state::{PathState, PathTiming, Phase};
pub use places::{Door, Places, Room, Seated};
pub use pool::{Begun, ChannelPool, Lease, Owing, PoolConfig, PoolState};
pub use service::{AnswerState, ConnState, Next, Responder, Service, dispatch};
