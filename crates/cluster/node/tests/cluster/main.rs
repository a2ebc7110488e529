//! Several nodes as one cache: placement, loss of nodes, and jobs.

mod copies;
mod hedge;
mod hot;
mod join;
mod loss;
mod sim;
mod simulation;
mod warm;
