//! Reads of the object below the changes of an open file, through the cache. Knows no changes.

use super::OpenObject;
use spurline_types::{Error, ErrorKind, ObjectRef, Result};
use spurline_volume::ReadData;
use std::time::{Duration, Instant};

/// Pause before a read that the origin does not serve now.
const ORIGIN_DOWN_PAUSE: Duration = Duration::from_millis(200);

impl OpenObject {
    /// Fills `dst` from the object.
    pub(super) fn read_object(&self, object: Option<&ObjectRef>, offset: u64, dst: &mut [u8]) -> Result<()> {
        let Some(object) = object else { return Ok(()) };
        let deadline = self.context.requests.read_deadline();
        let mut read = 0;
        while read < dst.len() {
            let at = offset + read as u64;
            let found = match self.context.reads.read(object, at, &mut dst[read..]) {
                // A node says so at once, for readers that have other nodes; this file is only here.
                Err(error) if error.kind() == ErrorKind::OriginDown && Instant::now() < deadline => {
                    std::thread::sleep(ORIGIN_DOWN_PAUSE);
                    continue;
                }
                found => found?,
            };
            let count = match found {
                ReadData::Copied(count) => count,
                ReadData::Shared(slice) => {
                    let count = slice.len().min(dst.len() - read);
                    dst[read..read + count].copy_from_slice(&slice[..count]);
                    count
                }
            };
            if count == 0 {
                let why = format!("the object ends at {at}, before its length of {}", object.size);
                return Err(Error::new(ErrorKind::Corrupt, why));
            }
            read += count;
        }
        Ok(())
    }
}
