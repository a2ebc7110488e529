//! Several nodes as one cache: who holds what, what happens when one is lost, and what jobs ask of them.

mod copies;
mod hedge;
mod hot;
mod join;
mod loss;
mod sim;
mod simulation;
mod warm;
