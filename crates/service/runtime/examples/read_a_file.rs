//! Lists a source and reads one of its files through the cache: no mount, no command line.
//!
//! `cargo run -p spurline-runtime --example read_a_file s3://BUCKET/PREFIX NAME`

use spurline_config::{CacheSize, Fault, HostLimits, RawCache, RawMemory, RawVolume, SourceUrl};
use spurline_runtime::open_volume;
use spurline_types::{ObjectRef, Size, Stats, Version};
use spurline_volume::ReadData;
use std::sync::Arc;

fn main() -> Result<(), Fault> {
    let mut words = std::env::args().skip(1);
    let source: SourceUrl = words.next().unwrap_or_else(|| "/usr/share".to_owned()).parse().map_err(usage)?;
    let name = words.next();

    // A cache of 1 GiB on disk, 100 MiB of memory; everything else by default.
    let cache_dir = vec![std::env::temp_dir().join("read-a-file")];
    let cache = RawCache { cache_dir, cache_size: CacheSize::Bytes(1 << 30), ..RawCache::default() };
    let raw = RawVolume { cache, memory: RawMemory { buffer_size: Size(100 << 20) }, ..RawVolume::new(source) };
    let mut open = open_volume(&raw.check(&HostLimits::detect())?, &Arc::new(Stats::default()))?;
    open.keep_directories();
    let volume = open.volume();

    let page = volume.list(b"", None, 20)?;
    for entry in &page.entries {
        println!("{:>12}  {}", entry.attr.size, String::from_utf8_lossy(&entry.name));
    }

    let Some(name) = name else { return Ok(()) };
    let attr = volume.lookup(name.as_bytes())?;
    let object = ObjectRef::new(volume.source(), name.as_bytes(), Version::new(attr.version.settled_text()), attr.size);
    let (mut offset, mut buffer) = (0, vec![0; 1 << 20]);
    while offset < attr.size {
        offset += match volume.read(&object, offset, &mut buffer)? {
            ReadData::Copied(bytes) => bytes as u64,
            ReadData::Shared(slice) => slice.len() as u64,
        };
    }
    println!("{offset} bytes of {name} read");
    Ok(())
}

fn usage(why: String) -> Fault {
    Fault::usage(why, "give a source, and the name of a file in it")
}
