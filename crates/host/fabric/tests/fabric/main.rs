//! Facts and findings of made-up hosts.

mod doctor;
mod facts;
mod hostile;
