//! A cache group as a volume: which node to ask for what, and what happens when one does not answer.
//! It knows channels, not what they are made of, and it holds no credentials and no metadata.
#![forbid(unsafe_code)]

mod ahead;
mod hedge;
mod keeper;
mod pace;
mod paths;
mod peer;
pub mod placement;
mod pulse;
mod reads;
mod remote;
mod roster;
mod siblings;
mod split;
mod spread;
mod warm;

pub use keeper::Keeper;
pub use pace::Pace;
pub use paths::{Dialer, Paths, PathsConfig};
pub use peer::{Patience, Peer};
pub use remote::{Remote, RemoteConfig};
pub use roster::{MakePeer, Roster, View};
pub use siblings::Siblings;
pub use warm::Extent;
