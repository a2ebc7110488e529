//! Proofs and TLS on real streams.

mod stream;
mod tls;
