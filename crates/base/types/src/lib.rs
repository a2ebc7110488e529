//! The vocabulary that every layer shares: sizes and durations, object versions, attributes, errors, counters. Deliberately knows
//! no I/O, no clock, no thread and no wire format.
#![forbid(unsafe_code)]

pub mod access_times;
pub mod attr;
pub mod congestion;
pub mod content_type;
pub mod errno;
pub mod error;
pub mod fault;
pub mod host_port;
pub mod id;
pub mod id_hash;
pub mod member;
pub mod object_headers;
pub mod open_flags;
pub mod option_list;
pub mod path_stats;
pub mod sink;
pub mod staged;
pub mod stats;
pub mod units;
pub mod url;

pub use access_times::AccessTimes;
pub use attr::{DirEntry, FileKind, ListPage, ObjectAttr, unix_time};
pub use congestion::Congestion;
pub use content_type::content_type_of;
pub use error::{Error, ErrorKind, IoContext, Result, RetryAdvice};
pub use fault::Fault;
pub use host_port::HostPort;
pub use id::{BlockId, ObjectId, ObjectRef, SourceTag, Version};
pub use member::Member;
pub use object_headers::{CONTENT_HEADERS, OBJECT_HEADERS_XATTR, ObjectHeaders, USER_METADATA_PREFIX};
pub use option_list::{LABEL_OPTIONS, escape_option, split_option_list};
pub use path_stats::{PathStats, PathTable};
pub use sink::{ByteSink, SliceSink};
pub use staged::{STAGE_ATTRIBUTE, STAGED_ETAG, STAGED_UPLOAD, STAGED_XATTR, is_staged_etag, is_staged_upload};
pub use stats::Stats;
pub use units::{Size, parse_duration};
