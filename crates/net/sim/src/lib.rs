//! An in-memory transport with seeded faults, for tests of what stands on the transport crate. It deliberately knows
//! no socket; the only clock it reads is that of the caller's deadline.
//!
//! [`SimNode`] is a peer in memory, its answers pass through the same frame code as TCP's; [`FaultyConnector`] makes
//! the channels of any other transport fail; [`SimRail`] makes them run over a network interface that does.
#![forbid(unsafe_code)]

mod faults;
mod faulty;
mod node;
mod rail;

pub use faults::{Fault, FaultPlan, Rates};
pub use faulty::FaultyConnector;
pub use node::{After, SimConnector, SimNode};
pub use rail::{RailMode, SimRail};
