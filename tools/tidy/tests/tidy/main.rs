//! The house rules. Each test names the files that break its rule and what to do.

mod dialect;
mod house;
mod names;
mod prose;
mod quotes;
mod weights;
