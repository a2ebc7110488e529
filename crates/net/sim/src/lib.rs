//! An in-memory transport with seeded faults, for tests of code above the transport crate. Knows no socket, and no clock but that
//! of the caller's deadline.
//!
//! [`SimNode`] is a peer in memory whose answers pass through the same frame code as TCP's; [`FaultyConnector`] makes the
//! channels of any other transport fail; [`SimRail`] makes channels run over a faulty network interface; [`DetachedConnector`]
//! lets the node work on while a reader gives up.
#![forbid(unsafe_code)]

mod detached;
mod faults;
mod faulty;
mod node;
mod rail;

pub use detached::DetachedConnector;
pub use faults::{FaultPlan, FaultRates, SimFault};
pub use faulty::FaultyConnector;
pub use node::{AfterAnswer, SimConnector, SimNode};
pub use rail::{RailMode, SimRail};
