//! An S3 endpoint: HTTP requests in, calls of volumes and file services out. Sources appear as buckets. Knows neither sources
//! behind a volume, nor command lines.
#![forbid(unsafe_code)]

mod access_keys;
mod aws_chunked;
mod bucket;
mod changes;
mod chunks;
mod client_pace;
mod client_rights;
mod client_socket;
mod conditions;
mod connections;
mod error_documents;
mod errors;
mod http_dates;
mod keys;
mod listing;
mod metadata;
mod objects;
mod server;
mod service;
mod signature_forms;
mod special_requests;
mod tls;
mod upload_checksums;
mod uploads;

pub use access_keys::AccessKeys;
pub use bucket::SourceBucket;
pub use server::{EndpointConfig, EndpointLimits, S3Endpoint};
pub use tls::EndpointCertificate;
