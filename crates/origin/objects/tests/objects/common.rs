//! What the tests of buckets share: reads without a cache.

use spurline_origin::OriginStore;
use spurline_types::{Error, ErrorKind, ListPage, ObjectAttr, ObjectRef, Result, SliceSink};
use spurline_volume::info::FileInfo;
use spurline_volume::{ReadData, Volume, VolumeSpace};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub fn read(store: &dyn OriginStore, object: &ObjectRef, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0xaa; len];
    let mut sink = SliceSink::new(&mut bytes);
    store.read(object, offset, &mut sink, soon())?;
    assert_eq!(sink.filled(), len, "a read that succeeds has filled its sink");
    Ok(bytes)
}

/// Reads of the bucket without a cache.
pub struct PlainReads(pub Arc<dyn OriginStore>);

impl Volume for PlainReads {
    fn source(&self) -> &str {
        self.0.source_url()
    }

    fn block_size(&self) -> u64 {
        1 << 20
    }

    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        self.0.lookup(path, soon())
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        self.0.list(path, cursor, max, soon())
    }

    fn readlink(&self, _path: &[u8]) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::Unsupported, "no test needs it"))
    }

    fn read(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<ReadData> {
        // As a cache does: the thread may be one that sends parts.
        let fetch = || read(&*self.0, object, offset, dst.len());
        let bytes = std::thread::scope(|scope| scope.spawn(fetch).join().unwrap())?;
        dst.copy_from_slice(&bytes);
        Ok(ReadData::Copied(bytes.len()))
    }

    fn prefetch(&self, _object: &ObjectRef, _blocks: Range<u32>, _piece: usize) {}

    fn capacity(&self) -> Result<VolumeSpace> {
        Err(Error::new(ErrorKind::Unsupported, "no test needs it"))
    }

    fn info(&self, _path: &[u8]) -> Result<FileInfo> {
        Err(Error::new(ErrorKind::Unsupported, "no test needs it"))
    }
}
