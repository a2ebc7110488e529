//! Parts and records on a disk, also after a loss of power and with flipped bits.

use super::part_file::PART_CHUNK;
use super::*;
use crate::manifest::Phase;
use crate::manifest_samples::sample;
use std::fs::OpenOptions;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;

struct DiskFolders {
    _dir: tempfile::TempDir,
    folders: Vec<PathBuf>,
}

impl DiskFolders {
    fn new() -> DiskFolders {
        let dir = tempfile::tempdir().unwrap();
        let folders = vec![dir.path().join("one"), dir.path().join("two")];
        DiskFolders { _dir: dir, folders }
    }

    fn open(&self) -> FolderDisk {
        FolderDisk::open(&self.folders).unwrap()
    }
}

fn bytes_of(len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at * 7 + at / 251) as u8).collect()
}

fn write_part(disk: &FolderDisk, name: &str, bytes: &[u8], frame: usize) {
    let mut part = disk.begin_part(name).unwrap();
    bytes.chunks(frame).for_each(|frame| part.append(frame).unwrap());
    part.finish().unwrap();
}

fn read_part(disk: &FolderDisk, name: &str, from: usize, len: usize) -> Result<Vec<u8>> {
    let mut out = vec![0; len];
    disk.read_part(name, from as u64, &mut out)?;
    Ok(out)
}

#[test]
fn a_part_is_read_back_over_the_borders_of_chunks() {
    let folders = DiskFolders::new();
    let disk = folders.open();
    let chunk = PART_CHUNK as usize;
    let lengths = [0, 1, chunk - 1, chunk, chunk + 1, 3 * chunk + 17, 4 * chunk, 9 * chunk + 4097];
    for (number, len) in lengths.into_iter().enumerate() {
        let bytes = bytes_of(len);
        let name = format!("part-{number}");
        write_part(&disk, &name, &bytes, chunk / 3 + 5);
        assert_eq!(disk.part_len(&name).unwrap(), len as u64);
        for (from, end) in
            [(0, len), (len / 2, len), (len.saturating_sub(1), len), (chunk.min(len), len), (0, len.min(1))]
        {
            assert!(read_part(&disk, &name, from, end - from).unwrap() == bytes[from..end], "{from} to {end} of {len}");
        }
        assert_eq!(read_part(&disk, &name, len, 1).unwrap_err().kind(), ErrorKind::Invalid, "{len}");
    }
    assert_eq!(disk.parts().unwrap().len(), lengths.len());
    disk.remove_part("part-1").unwrap();
    disk.remove_part("part-1").unwrap();
    assert_eq!(read_part(&disk, "part-1", 0, 1).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_damaged_byte_is_found_by_reads_of_that_chunk_only() {
    let folders = DiskFolders::new();
    let disk = folders.open();
    let chunk = PART_CHUNK as usize;
    let bytes = bytes_of(3 * chunk);
    write_part(&disk, "part", &bytes, chunk);
    let mut file = OpenOptions::new().read(true).write(true).open(disk.path_of("part")).unwrap();
    let mut byte = [0];
    file.seek(SeekFrom::Start(PART_CHUNK + 5)).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.write_all_at(&[byte[0] ^ 1], PART_CHUNK + 5).unwrap();
    assert_eq!(read_part(&disk, "part", chunk, 1).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(read_part(&disk, "part", 0, 3 * chunk).unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(read_part(&disk, "part", 0, chunk).unwrap() == bytes[..chunk]);
    assert!(read_part(&disk, "part", 2 * chunk, chunk).unwrap() == bytes[2 * chunk..]);
    // The checksums themselves.
    file.write_all_at(&[0xff; 4], 3 * PART_CHUNK + 1).unwrap();
    assert_eq!(disk.part_len("part").unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_part_that_was_not_finished_is_gone() {
    let folders = DiskFolders::new();
    let disk = folders.open();
    let mut part = disk.begin_part("dropped").unwrap();
    part.append(b"abc").unwrap();
    drop(part);
    let mut part = disk.begin_part("killed").unwrap();
    part.append(b"abc").unwrap();
    std::mem::forget(part);
    assert!(disk.parts().unwrap().is_empty());
    drop(disk);
    let disk = folders.open();
    assert!(disk.parts().unwrap().is_empty());
    let left = folders.folders.iter().flat_map(|folder| std::fs::read_dir(folder.join("stage")).unwrap());
    let left = left.map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name != RECORDS_FILE && name != FOLDER_FILE).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn records_the_term_and_the_identity_are_there_again() {
    let folders = DiskFolders::new();
    let disk = folders.open();
    let identity = disk.identity().unwrap();
    assert_eq!((disk.term().unwrap(), disk.manifests().unwrap().len()), (0, 0));
    let one = sample("a/one", "1", 1);
    let two = sample("a/two", "2", 2);
    let changes = vec![
        RecordChange::Term(7),
        RecordChange::Put(Box::new(one.clone()), Some(b"one".to_vec())),
        RecordChange::Put(Box::new(two.clone()), Some(b"two".to_vec())),
    ];
    disk.change_records(changes).unwrap();
    // The bytes stay where a change brings none.
    let done = Manifest { phase: Phase::Removing, ..one.clone() };
    disk.change_records(vec![RecordChange::Put(Box::new(done.clone()), None)]).unwrap();
    disk.change_records(vec![RecordChange::Put(Box::new(two.clone()), Some(Vec::new()))]).unwrap();
    drop(disk);
    let disk = folders.open();
    assert_eq!((disk.term().unwrap(), disk.identity().unwrap()), (7, identity));
    let mut kept = disk.manifests().unwrap();
    kept.sort_by_key(|(manifest, _)| manifest.order);
    assert_eq!(kept, [(done, 3), (two.clone(), 0)]);
    assert_eq!(disk.read_inline(&one.record).unwrap(), b"one");
    disk.change_records(vec![RecordChange::Remove(one.record.clone())]).unwrap();
    assert_eq!(disk.read_inline(&one.record).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(disk.manifests().unwrap(), [(two, 0)]);
    assert_ne!(DiskFolders::new().open().identity().unwrap(), identity);
}

#[test]
fn a_further_name_outlives_the_first_one() {
    let folders = DiskFolders::new();
    let disk = folders.open();
    write_part(&disk, "old", b"bytes", 2);
    // The usual folder of some names is the other.
    let names: Vec<_> = (0..8).map(|number| ("old".to_owned(), format!("new-{number}"))).collect();
    disk.link_parts(&names).unwrap();
    disk.link_parts(&names).unwrap();
    disk.remove_part("old").unwrap();
    for (_, new) in &names {
        assert_eq!(read_part(&disk, new, 0, 5).unwrap(), b"bytes");
    }
    assert_eq!(disk.link_parts(&names).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn parts_are_found_with_more_folders_and_in_another_order() {
    let mut folders = DiskFolders::new();
    let disk = folders.open();
    let identity = disk.identity().unwrap();
    let names: Vec<String> = (0..8).map(|number| format!("part-{number}")).collect();
    names.iter().for_each(|name| write_part(&disk, name, b"bytes", 5));
    let first = sample("a/one", "1", 1);
    disk.change_records(vec![RecordChange::Put(Box::new(first.clone()), Some(b"one".to_vec()))]).unwrap();
    drop(disk);
    let further = folders.folders[0].with_file_name("three");
    folders.folders.insert(0, further);
    folders.folders.swap(1, 2);
    assert!(FolderDisk::has_records(&folders.folders));
    let disk = folders.open();
    assert_eq!(disk.identity().unwrap(), identity, "no disk is lost");
    assert_eq!(disk.manifests().unwrap(), [(first, 3)]);
    for name in &names {
        assert_eq!(read_part(&disk, name, 0, 5).unwrap(), b"bytes");
        disk.remove_part(name).unwrap();
    }
    assert!(disk.parts().unwrap().is_empty());
}

#[test]
fn a_lost_disk_is_told_by_another_identity() {
    let folders = DiskFolders::new();
    let identity = folders.open().identity().unwrap();
    assert_eq!(folders.open().identity().unwrap(), identity);
    std::fs::remove_dir_all(&folders.folders[1]).unwrap();
    let other = folders.open().identity().unwrap();
    assert_ne!(other, identity);
    assert_eq!(folders.open().identity().unwrap(), other);
}

#[test]
fn a_damaged_record_is_told_and_comes_again_from_another_node() {
    let folders = DiskFolders::new();
    let disk = folders.open();
    let first = sample("a/one", "1", 1);
    let put = RecordChange::Put(Box::new(first.clone()), Some(b"one".to_vec()));
    disk.change_records(vec![put.clone()]).unwrap();
    let transaction = disk.database.begin_write().unwrap();
    {
        let mut objects = transaction.open_table(OBJECTS_TABLE).unwrap();
        let mut record = objects.get(first.record.as_str()).unwrap().unwrap().value().to_vec();
        *record.last_mut().unwrap() ^= 1;
        objects.insert(first.record.as_str(), record.as_slice()).unwrap();
    }
    transaction.commit().unwrap();
    assert_eq!(disk.read_inline(&first.record).unwrap_err().kind(), ErrorKind::Corrupt);
    let identity = disk.identity().unwrap();
    assert!(disk.manifests().unwrap().is_empty());
    assert_ne!(disk.identity().unwrap(), identity, "no leader takes the disk for proof that nothing else was staged");
    disk.change_records(vec![put]).unwrap();
    assert_eq!(disk.read_inline(&first.record).unwrap(), b"one");
}
