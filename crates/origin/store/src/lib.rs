//! Stores of objects: buckets of S3, Google Cloud Storage and Azure, each with its connections, threads and permits, for single
//! requests and for the policy of their repetition. It deliberately knows no folder, no file, no directory of a file system and no
//! cache of names: keys, prefixes, versions, bytes.
#![forbid(unsafe_code)]

mod aws;
mod aws_sources;
mod backend;
mod ca_store;
mod client;
mod config;
mod credential_store;
mod folder_times;
mod listed_etags;
mod messages;
mod object_store_backend;
mod open_bucket;
mod own_objects;
mod refusals;
mod request_options;
mod retry;
mod s3;
mod s3_wire;
mod s3_writes;
mod shared_buckets;
mod sigv4;
mod source;
mod source_requests;
mod transfer_runtimes;
mod write_backend;

pub use backend::{ObjectBackend, RawBody, RawObject, RawPage, RequestFailure, RetryHint, bucket_unavailable};
pub use config::{AwsCredentials, EnvironmentSource, OriginOptions};
pub use folder_times::FolderTimes;
pub use listed_etags::{ListedEtags, ListingEtags};
pub use open_bucket::open_bucket;
pub use own_objects::{HIDDEN_NAME, mark_in, marked_as, without_mark};
pub use request_options::RequestOptions;
pub use retry::RetryState;
pub use s3_wire::{bare_etag, encode_query};
pub use shared_buckets::{HeldBucket, SharedBucket, SharedBuckets};
pub use source::{SourceLocation, SourceScheme, normal_url};
pub use source_requests::{BucketSides, SourceRequests};
pub use write_backend::{
    AnswerProgress, CopySource, ObjectAttributes, ObjectBody, ObjectWriteBackend, STAGE_ATTRIBUTE, STAGED_ETAG,
    STAGED_UPLOAD, StoredObject, UploadedPart, WriteCondition, assembly_time, is_staged_etag, is_staged_upload,
    transfer_time,
};
