//! The errors of S3 for those of volumes and files. Knows no request.

use http::StatusCode;
use s3s::{S3Error, S3ErrorCode, s3_error};
use spurline_fs::FsError;
use spurline_types::{Error, ErrorKind};

/// The error of a read, a lookup or a listing.
pub(crate) fn volume_error(error: &Error) -> S3Error {
    let code = match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory => S3ErrorCode::NoSuchKey,
        ErrorKind::PermissionDenied => S3ErrorCode::AccessDenied,
        // A client that repeats the request gets the new version of a replaced object.
        ErrorKind::Stale
        | ErrorKind::Timeout
        | ErrorKind::Unavailable
        | ErrorKind::OriginDown
        | ErrorKind::NoMemory => S3ErrorCode::ServiceUnavailable,
        ErrorKind::Throttled => S3ErrorCode::SlowDown,
        ErrorKind::Invalid => S3ErrorCode::InvalidArgument,
        ErrorKind::Unsupported => S3ErrorCode::NotImplemented,
        ErrorKind::Io(libc::ENOENT | libc::ENOTDIR | libc::EISDIR) => S3ErrorCode::NoSuchKey,
        ErrorKind::Io(libc::EACCES | libc::EPERM) => S3ErrorCode::AccessDenied,
        _ => S3ErrorCode::InternalError,
    };
    S3Error::with_message(code, error.to_string())
}

/// The error of a change.
pub(crate) fn change_error(error: &FsError) -> S3Error {
    let code = match error.errno() {
        libc::ENOENT => S3ErrorCode::NoSuchKey,
        libc::EACCES | libc::EPERM | libc::EROFS => S3ErrorCode::AccessDenied,
        libc::EEXIST => S3ErrorCode::PreconditionFailed,
        libc::ENAMETOOLONG => S3ErrorCode::KeyTooLongError,
        libc::EILSEQ | libc::EINVAL => S3ErrorCode::InvalidArgument,
        // Another writer was faster.
        libc::ESTALE => S3ErrorCode::OperationAborted,
        libc::ETIMEDOUT | libc::EHOSTDOWN | libc::EBUSY | libc::ENOMEM => S3ErrorCode::ServiceUnavailable,
        libc::ENOSPC | libc::EDQUOT => {
            let mut full = s3_error!(InternalError, "the source is full: {error}");
            full.set_status_code(StatusCode::INSUFFICIENT_STORAGE);
            return full;
        }
        libc::EISDIR | libc::ENOTEMPTY => {
            return s3_error!(
                InvalidRequest,
                "the key is the name of a folder of the source, and a file can't have the same name: other keys begin with it and a \
                 slash; choose another key, or remove those"
            );
        }
        libc::ENOTDIR => {
            return s3_error!(
                InvalidRequest,
                "a part of the key that ends before a slash is the name of a file of the source, and a folder can't have the same \
                 name; choose another key, or remove that object"
            );
        }
        libc::EFBIG => S3ErrorCode::EntityTooLarge,
        _ => S3ErrorCode::InternalError,
    };
    S3Error::with_message(code, error.to_string())
}

/// An error of S3 with a code that the library behind the calls does not know.
pub(crate) fn other_error(status: StatusCode, code: &'static str, why: impl Into<String>) -> S3Error {
    let mut error = S3Error::with_message(S3ErrorCode::Custom(code.into()), why.into());
    error.set_status_code(status);
    error
}

/// The error of a thread that ended in the middle of its work.
pub(crate) fn lost_thread(error: &tokio::task::JoinError) -> S3Error {
    s3_error!(InternalError, "a thread of the endpoint ended early: {error}")
}
