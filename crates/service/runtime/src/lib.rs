//! Opens volumes and starts mounts, nodes and coordinators from a checked configuration, and finds and drains those that
//! run. It composes the layers below for any front end; it knows no command line, no screen, no signal, and ends no
//! process.
#![forbid(unsafe_code)]

pub mod admin;
pub mod coordinator;
pub mod drain;
pub mod group;
pub mod jobs;
pub mod limits;
pub mod locator;
pub mod mount;
pub mod node;
pub mod peers;
mod rails;
pub mod rules;
mod serving;
mod settings;
pub mod setup;
pub mod volume;

pub use coordinator::{RunningCoordinator, start_coordinator};
pub use drain::{DrainOutcome, DrainProgress, DrainRequest, drain_node};
pub use mount::{MountStop, PreparedMount, RunningMount, start_mount};
pub use node::{RunningNode, start_node};
pub use volume::{OpenVolume, open_volume};
