//! Every value round-trips, no bytes make a decoder panic, and no prefix of a frame passes as a whole one.

use proptest::prelude::*;
use spurline_proto::{
    AnswerBody, CapacityAnswer, Challenge, ChallengeAnswer, ChangeId, FRAME_ALIGN, FrameError, FrameFlags, FrameHeader,
    FrameOp, HEADER_LEN, HelloRequest, KnownGrants, MAX_PAYLOAD, MAX_RAILS, MAX_REQUEST_BODY, MAX_STAGE_CALL,
    MAX_WRITE, NONCE_LEN, NodeRequest, NumberList, ObjectRange, OpenFlags, PROOF_LEN, RailInfo, RailLink, RangeDone,
    RangeList, RangesDone, ReadFlags, ReadRequest, SentPart, SentParts, StageRequest, StoreAnswer, StoreAttributes,
    StoreBody, StoreBytes, StoreCall, StoreCondition, StoreObject, StoreRequest, StoreRetry, StoreSource, TextList,
    TokenProof, UploadParts, VolumeId, WelcomeAnswer, WireCaller, WriteAnswer, WriteCall, WriteRequest, check_path,
    decode_error, encode_error_message, frame_padding,
};
use spurline_types::{DirEntry, Error, ErrorKind, FileKind, ListPage, ObjectAttr, Version};
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::writes::{
    AttrChange, CacheVersion, Caller, Change, FileIdentity, FileTime, ListedName, LockConflict, LockFamily, LockKind,
    LockRange, NamePath, NewTime, NodeAttr, NodePath, OpenAttrCall, SourceSpace,
};
use std::time::{Duration, UNIX_EPOCH};

fn name() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 1..20)
        .prop_map(|mut name| {
            name.iter_mut().filter(|b| matches!(b, 0 | b'/')).for_each(|b| *b = b'_');
            name
        })
        .prop_filter("dots", |name| name != b"." && name != b"..")
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(name(), 0..4).prop_map(|parts| parts.join(&b'/'))
}

fn attr() -> impl Strategy<Value = ObjectAttr> {
    let kind = prop_oneof![Just(FileKind::File), Just(FileKind::Directory), Just(FileKind::Symlink)];
    // 2^40 s are 34,000 years on either side of the epoch.
    let time = (-(1i64 << 40)..1 << 40, 0u32..1_000_000_000).prop_map(|(secs, nanos)| {
        let whole = Duration::from_secs(secs.unsigned_abs());
        let base = if secs < 0 { UNIX_EPOCH - whole } else { UNIX_EPOCH + whole };
        base + Duration::from_nanos(nanos.into())
    });
    (kind, any::<u64>(), time, any::<u16>(), ".{0,30}", prop::option::of(".{0,30}")).prop_map(
        |(kind, size, mtime, mode, version, etag)| ObjectAttr {
            kind,
            size,
            mtime,
            mode,
            version: Version::new(&version),
            etag,
        },
    )
}

fn page() -> impl Strategy<Value = ListPage> {
    let entry = (name(), attr()).prop_map(|(name, attr)| DirEntry { name, attr });
    (prop::collection::vec(entry, 0..8), prop::option::of(prop::collection::vec(any::<u8>(), 0..20)))
        .prop_map(|(entries, next)| ListPage { entries, next, marker: None })
}

fn rail() -> impl Strategy<Value = RailInfo> {
    let address = prop_oneof![
        (any::<[u8; 4]>(), 0u8..=32).prop_map(|(ip, bits)| (ip.into(), bits)),
        (any::<[u8; 16]>(), 0u8..=128).prop_map(|(ip, bits)| (ip.into(), bits)),
    ];
    (".{0,9}", address, any::<u16>(), any::<u8>(), any::<u64>(), any::<u32>()).prop_map(
        |(name, (address, prefix_len), port, link, fabric, speed_mbit)| RailInfo {
            name,
            address,
            prefix_len,
            port,
            link: RailLink::from_code(link),
            fabric,
            speed_mbit,
        },
    )
}

/// Encodes, splits the frame, decodes, compares; then checks that every shorter body and a longer one are refused.
fn round_trip(request: NodeRequest<'_>, id: u64) {
    let mut out = b"before".to_vec();
    request.encode(id, &mut out).unwrap();
    let frame = &out[6..];
    assert!(frame.len().is_multiple_of(FRAME_ALIGN));
    let header = FrameHeader::decode(frame.first_chunk().unwrap()).unwrap();
    header.check_request().unwrap();
    assert_eq!((header.id, header.op), (id, request.op()));
    let body = &frame[HEADER_LEN..HEADER_LEN + header.body_len as usize];
    assert_eq!(frame.len(), HEADER_LEN + body.len() + frame_padding(body.len()).len());
    assert_eq!(NodeRequest::decode(header.op, body).unwrap(), request);
    if !matches!(request, NodeRequest::Unknown { .. }) {
        for cut in 0..body.len() {
            assert!(NodeRequest::decode(header.op, &body[..cut]).is_err(), "{cut} of {} bytes", body.len());
        }
        let longer = [body, b"x"].concat();
        assert!(NodeRequest::decode(header.op, &longer).is_err());
    }
    // Every request has a text form.
    assert!(!request.to_string().is_empty());
}

fn body_round_trip<T: AnswerBody + PartialEq + std::fmt::Debug>(value: &T) {
    let mut out = Vec::new();
    value.encode(&mut out);
    assert_eq!(&T::decode(&out).unwrap(), value);
    for cut in 0..out.len() {
        assert!(T::decode(&out[..cut]).is_err());
    }
    out.push(0);
    assert!(T::decode(&out).is_err());
}

proptest! {
    #[test]
    fn requests_round_trip(
        id: u64, volume: u32, path in path(), cursor in prop::option::of(prop::collection::vec(any::<u8>(), 0..9)),
        max: u32, text in ".{0,30}", size: u64, offset: u64, len: u32, op in 100u16..,
    ) {
        let (volume, path) = (VolumeId(volume), path.as_slice());
        round_trip(NodeRequest::Hello(HelloRequest { min_version: 3, max_version: max as u16, peer: &text, source: &text }), id);
        round_trip(NodeRequest::Ping, id);
        let nonce = [id as u8; NONCE_LEN];
        round_trip(NodeRequest::Challenge(Challenge { scheme: max as u16, nonce, peer: &text }), id);
        round_trip(NodeRequest::Prove(TokenProof([len as u8; PROOF_LEN])), id);
        body_round_trip(&ChallengeAnswer { nonce, node: text.clone() });
        body_round_trip(&TokenProof([id as u8; PROOF_LEN]));
        round_trip(NodeRequest::Lookup { volume, path, max_age_ms: max }, id);
        round_trip(NodeRequest::FolderMarker { volume, path, max_age_ms: max }, id);
        round_trip(NodeRequest::List { volume, path, cursor: cursor.as_deref(), max, max_age_ms: !max }, id);
        round_trip(NodeRequest::ReadLink { volume, path }, id);
        round_trip(NodeRequest::ObjectHeaders { volume, path }, id);
        for bits in 0..8 {
            let flags = ReadFlags::from_bits(bits).unwrap();
            round_trip(NodeRequest::Read(ReadRequest { volume, path, version: &text, size, offset, len, flags }), id);
        }
        round_trip(NodeRequest::StatFs { volume }, id);
        round_trip(NodeRequest::Info { volume, path }, id);
        round_trip(NodeRequest::Describe, id);
        round_trip(NodeRequest::HeldObjects { after: None }, id);
        round_trip(NodeRequest::HeldObjects { after: Some(u128::from(size) << 64 | u128::from(offset)) }, id);
        round_trip(NodeRequest::Weigh { weight: max }, id);
        round_trip(NodeRequest::DropAll { volume, every_source: max % 2 == 0, with_pinned: max % 3 == 0, part: max }, id);
        round_trip(NodeRequest::Rules { text: &text }, id);
        let stage = NodeRequest::Stage(StageRequest { call: path, payload: &[] });
        round_trip(stage, id);
        prop_assert_eq!(stage.with_payload(path).unwrap().payload(), path);
        round_trip(NodeRequest::Unknown { op, body: path }, id);
    }

    #[test]
    fn requests_for_writable_volumes_round_trip(
        id: u64, volume: u32, path in path(), name in name(), (identity, lasting) in any::<([u8; 32], bool)>(), number: u32,
        long: u64, groups in prop::collection::vec(any::<u32>(), 0..40), (yes, again, marked) in any::<(bool, bool, bool)>(),
        secs in 0u64..1 << 40, nanos in 0u32..1_000_000_000,
    ) {
        let identity = FileIdentity::new(identity, lasting);
        let node = NodePath { path: &path, expected: yes.then_some(identity) };
        let at = NamePath { directory: node, name: &name };
        let time = NewTime::At(FileTime { seconds: secs as i64, nanos });
        let some = |n| (n % 2 == 0).then_some(n);
        let set = AttrChange {
            mode: some(number), uid: some(number / 2), gid: some(number / 4), size: yes.then_some(long),
            atime: again.then_some(time), mtime: Some(NewTime::Now),
        };
        let (file, offset, len, flags, mode) = (id, long, !long, number, !number);
        let open = OpenFlags::new(number);
        let range = LockRange { start: long, end: id };
        let mut numbers = Vec::new();
        let files = NumberList::new(&[file, long, offset], &mut numbers);
        let changes = [
            Change::Mkdir { at, mode, implied: yes }, Change::Mknod { at, mode, rdev: long }, Change::Symlink { at, target: &name },
            Change::Link { from: node, to: at }, Change::Unlink { at }, Change::Rmdir { at },
            Change::Rename { from: at, to: at, flags }, Change::SetAttr { of: node, set },
            Change::SetXattr { of: node, name: &name, value: &[], flags }, Change::RemoveXattr { of: node, name: &name },
        ];
        let attr_calls = [
            OpenAttrCall::Access(mode), OpenAttrCall::Get(&name), OpenAttrCall::List, OpenAttrCall::Remove(&name),
            OpenAttrCall::Set { name: &name, value: &[], flags },
        ];
        let calls = [
            WriteCall::Capabilities, WriteCall::Space, WriteCall::SyncAll, WriteCall::Renew, WriteCall::Stat(node),
            WriteCall::Lookup(at), WriteCall::ReadLink(node), WriteCall::Access(node, mode),
            WriteCall::GetXattr(node, &name), WriteCall::ListXattr(node), WriteCall::Open { at: node, flags: open, file },
            WriteCall::Create { at, flags: open, mode, file }, WriteCall::CreateUnnamed { directory: node, flags: open, mode, file },
            WriteCall::LinkOpen { file, to: at }, WriteCall::OpenDirectory { at: node, file },
            WriteCall::Read { file, offset, len: number }, WriteCall::Write { file, offset, append: marked, lose_privileges: yes, flush: again },
            WriteCall::Allocate { file, mode, offset, len },
            WriteCall::CopyRange { file, offset, to: !file, to_offset: len, len }, WriteCall::Seek { file, offset, whence: 3 },
            WriteCall::Sync { file, data_only: yes }, WriteCall::Flush { file }, WriteCall::StatOpen { file },
            WriteCall::SetAttrOpen { file, set }, WriteCall::TestLock { file, owner: len, range, kind: LockKind::Read },
            WriteCall::SetLock { file, family: LockFamily::Flock, owner: len, range, kind: LockKind::Unlock },
            WriteCall::SetLock { file, family: LockFamily::Posix, owner: len, range, kind: LockKind::Write },
            WriteCall::FindGrant { at: node, family: LockFamily::Posix, range, kind: LockKind::Write },
            WriteCall::ReadDirectory { file, from: offset, max: number, attrs: yes }, WriteCall::Close { opened_below: offset, files }, WriteCall::Reopen { of: long, flags: open, file },
            WriteCall::KeepAnswers { changes: files }, WriteCall::OpenPath { at: node, file, reserves: yes },
            WriteCall::FindPathLock { at: node, family: LockFamily::Flock, range, kind: LockKind::Read },
            WriteCall::OpenAgain { at: node, flags: open, file }, WriteCall::OpenName { at, flags: open, file },
        ];
        let (mut scratch, caller) = (Vec::new(), Caller { uid: number, gid: mode, groups, pid: flags, umask: 0o22, rights_checked: yes });
        let sent = WireCaller::new(&caller, &mut scratch);
        prop_assert_eq!(&sent.to_caller(), &caller);
        let change = ChangeId { session: long, number: id };
        let attr_calls = attr_calls.map(|call| WriteCall::AttrOpen { file, call });
        for call in calls.into_iter().chain(changes.map(WriteCall::Change)).chain(attr_calls) {
            let known = [yes.then_some(identity), again.then_some(identity)];
            let write = WriteRequest {
                volume: VolumeId(volume), id: change, answered: len, again, marked, known, caller: sent, call, payload: &[],
            };
            round_trip(NodeRequest::Write(write), id);
            // Only calls with bytes accept a payload, and the frame announces its length.
            let with = NodeRequest::Write(write).with_payload(&name);
            let takes = matches!(
                call,
                WriteCall::Write { .. }
                    | WriteCall::Change(Change::SetXattr { .. })
                    | WriteCall::AttrOpen { call: OpenAttrCall::Set { .. }, .. }
            );
            prop_assert_eq!(with.is_ok(), takes);
            if let Ok(with) = with {
                let mut frame = Vec::new();
                with.encode(id, &mut frame).unwrap();
                let header = FrameHeader::decode(frame.first_chunk().unwrap()).unwrap();
                prop_assert_eq!((header.payload_len as usize, with.payload()), (name.len(), &name[..]));
                if let NodeRequest::Write(WriteRequest { call: WriteCall::Change(Change::SetXattr { value, .. }), .. }) = with {
                    prop_assert_eq!(value, &name[..]);
                }
            }
        }
        prop_assert!(NodeRequest::Ping.with_payload(&name).is_err());
    }

    #[test]
    fn requests_for_a_store_round_trip(
        id: u64, key in ".{0,40}", etag in prop::option::of(".{0,20}"), texts in prop::collection::vec(".{0,9}", 0..5),
        (number, is_folded, partial) in any::<(u32, bool, bool)>(), (long, other) in any::<(u64, u64)>(), code in 1u16..,
    ) {
        let mut scratch = Vec::new();
        let user = TextList::new(texts.iter().map(String::as_str), &mut scratch);
        prop_assert!(user.iter().eq(texts.iter().map(String::as_str)));
        let (key, etag) = (key.as_str(), etag.as_deref());
        let attributes = StoreAttributes { content: TextList::default(), user, storage_class: etag };
        let condition = etag.map_or(StoreCondition::Absent, StoreCondition::Version);
        let source = StoreSource { key, etag };
        let body = StoreBody { transfer: long, len: other, checksum: id };
        let calls = [
            StoreCall::Describe, StoreCall::Head { key }, StoreCall::List { prefix: key, token: etag, max: number, is_folded },
            StoreCall::Get { key, from: long, to: other, etag }, StoreCall::Put { key, attributes, condition, body },
            StoreCall::BeginUpload { key, attributes }, StoreCall::UploadPart { key, upload: key, number, body },
            StoreCall::CopyPart { key, upload: key, number, source, from: long, to: other },
            StoreCall::Complete { key, upload: key, condition, body }, StoreCall::Abort { key, upload: key },
            StoreCall::Copy { source, key, attributes: Some(attributes), condition: StoreCondition::None },
            StoreCall::Delete { key, condition }, StoreCall::Piece { transfer: long, offset: other },
            StoreCall::Await { transfer: long }, StoreCall::NoteSent { key, etag: key, size: long },
        ];
        for call in calls {
            let request = StoreRequest { volume: VolumeId(number), time_ms: number, call, payload: &[] };
            round_trip(NodeRequest::Store(request), id);
            let encoded = call.to_bytes();
            prop_assert_eq!(StoreCall::from_bytes(&encoded).unwrap(), call);
            let takes_bytes =
                call.body().is_some() || matches!(call, StoreCall::Piece { .. } | StoreCall::NoteSent { .. });
            prop_assert_eq!(NodeRequest::Store(request).with_payload(b"bytes").is_ok(), takes_bytes);
        }
        let list: Vec<Box<str>> = texts.iter().map(|text| text.as_str().into()).collect();
        let object = StoreObject { key: key.into(), size: long, mtime_s: other, etag: etag.map(Box::from) };
        let (from, to) = (is_folded.then_some(long), partial.then_some(other));
        let bytes = StoreBytes { etag: etag.map(Box::from), mtime_s: from, total: to, from, to, partial };
        let retries = [
            StoreRetry::Never, StoreRetry::AfterPause, StoreRetry::AfterRestart, StoreRetry::AtOnce, StoreRetry::SlowDown(from),
        ];
        let failures = retries.map(|retry| StoreAnswer::Failed(Error::new(ErrorKind::from_code(code), key), retry));
        for answer in [
            StoreAnswer::Done, StoreAnswer::Taken, StoreAnswer::Text(key.into()), StoreAnswer::Bytes(bytes),
            StoreAnswer::Working(from),
            StoreAnswer::Object(object.clone(), list.clone(), list.clone(), etag.map(Box::from)),
            StoreAnswer::Page(vec![object; texts.len()], list.clone(), etag.map(Box::from)),
        ].into_iter().chain(failures) {
            body_round_trip(&answer);
        }
        let sent = SentPart { offset: long, len: other, transfer: id, node: number };
        body_round_trip(&SentParts { nodes: list.clone(), parts: vec![sent; texts.len()] });
        let parts = UploadParts(list.into_iter().map(|etag| (number, etag)).collect());
        let mut encoded = Vec::new();
        parts.encode(&mut encoded);
        prop_assert_eq!(UploadParts::decode(&encoded).unwrap(), parts);
    }

    #[test]
    fn answers_of_writable_volumes_round_trip(
        name in name(), (identity, lasting) in any::<([u8; 32], bool)>(), n: [u32; 5], long: [u64; 7], bits: [bool; 8], text in ".{0,40}",
        secs in 0u64..1 << 40, nanos in 0u32..1_000_000_000, code in 1u16..,
    ) {
        let time = |more| FileTime { seconds: -(secs as i64) + more, nanos };
        let attr = NodeAttr {
            identity: FileIdentity::new(identity, lasting), inode: long[3],
            mode: n[0], nlink: n[1], uid: n[2], gid: n[3], rdev: long[0], size: long[1], blocks: long[2], blksize: n[4],
            atime: time(0), mtime: time(1), ctime: time(2),
        };
        let listed = |attr| ListedName { name: name.clone(), file_type: n[0], inode: long[0], next: long[1], attr };
        let conflict = LockConflict { kind: LockKind::Write, range: LockRange { start: long[0], end: long[1] }, pid: n[0] };
        let rename_directory = [DirectoryRename::Atomic, DirectoryRename::EachUpTo(long[0]), DirectoryRename::No];
        let locks = [LockScope::Source, LockScope::Group, LockScope::Mount][n[0] as usize % 3];
        for answer in [
            WriteAnswer::Done, WriteAnswer::UnknownFile, WriteAnswer::Attr(attr), WriteAnswer::Created(attr, None),
            WriteAnswer::Created(attr, Some(attr)),
            WriteAnswer::Opened(attr, CacheVersion::Settled(Version::new(&text))),
            WriteAnswer::Opened(attr, CacheVersion::OpenForChanges), WriteAnswer::Opened(attr, CacheVersion::JustChanged),
            WriteAnswer::Opened(attr, CacheVersion::SourceIsNear), WriteAnswer::Opened(attr, CacheVersion::OwnCache),
            WriteAnswer::Grants(KnownGrants { last_us: Some(long[1]), up_us: long[0], held: bits[7].then_some(conflict) }),
            WriteAnswer::Number(long[0]), WriteAnswer::Bytes(name.clone()), WriteAnswer::Unclear(text.clone()),
            WriteAnswer::Names(vec![listed(Some(attr)), listed(None)]), WriteAnswer::Conflict(None),
            WriteAnswer::Conflict(Some(conflict)), WriteAnswer::Failed(Error::new(ErrorKind::from_code(code), text.as_str())),
            WriteAnswer::Space(SourceSpace {
                block_size: long[0], blocks: long[1], blocks_free: long[2], blocks_available: long[3], files: long[4],
                files_free: long[5], name_max: n[0],
            }),
        ] {
            body_round_trip(&answer);
        }
        for rename_directory in rename_directory {
            body_round_trip(&WriteAnswer::Capabilities(WriteCapabilities {
                rename_directory, hard_links: bits[0], symlinks: bits[1], modes: bits[2], xattrs: bits[3], acls: bits[4],
                locks, holes: bits[5], copy: bits[6], publishes: bits[6] != bits[5],
            }));
        }
    }

    #[test]
    fn parts_round_trip(
        parts in prop::collection::vec((path(), ".{0,30}", any::<u64>(), any::<u64>(), any::<u64>()), 0..9), n: u64,
    ) {
        let parts: Vec<ObjectRange<'_>> = parts
            .iter()
            .map(|(path, version, size, offset, len)| ObjectRange { path, version, size: *size, offset: *offset, len: *len })
            .collect();
        let mut list = RangeList::default();
        prop_assert!(parts.iter().all(|part| list.push(part)));
        prop_assert_eq!((list.len(), list.is_empty()), (parts.len(), parts.is_empty()));
        prop_assert_eq!(&list.as_ranges().iter().collect::<Vec<_>>(), &parts);
        let volume = VolumeId(n as u32);
        for request in [NodeRequest::Warm { volume, verify: n % 2 == 0, parts: list.as_ranges() }, NodeRequest::Drop { volume, with_pinned: n % 2 == 1, parts: list.as_ranges() }, NodeRequest::Classify { volume, parts: list.as_ranges() }] {
            let mut frame = Vec::new();
            request.encode(n, &mut frame).unwrap();
            let header = FrameHeader::decode(frame.first_chunk().unwrap()).unwrap();
            let body = &frame[HEADER_LEN..HEADER_LEN + header.body_len as usize];
            prop_assert_eq!(NodeRequest::decode(header.op, body).unwrap(), request);
            // Whole ranges may be missing, never a part of one.
            for cut in 0..body.len() {
                if let Ok(NodeRequest::Warm { parts: fewer, .. } | NodeRequest::Drop { parts: fewer, .. } | NodeRequest::Classify { parts: fewer, .. }) = NodeRequest::decode(header.op, &body[..cut]) {
                    prop_assert!(parts.starts_with(&fewer.iter().collect::<Vec<_>>()));
                }
            }
        }
        let done = |error| RangeDone { moved_bytes: n, held_bytes: !n, error };
        body_round_trip(&RangesDone(vec![done(None), done(Some(Error::new(ErrorKind::Timeout, "late")))]));
    }

    #[test]
    fn bodies_round_trip(attr in attr(), page in page(), n: u64, node in ".{0,20}", rails in prop::collection::vec(rail(), 0..4)) {
        body_round_trip(&attr);
        body_round_trip(&page);
        body_round_trip(&CapacityAnswer { total_bytes: n, free_bytes: !n, total_files: n / 2, free_files: 1 });
        let (volume, placement_rule) = (VolumeId(n as u32), n as u16);
        body_round_trip(&WelcomeAnswer { version: 3, volume, block_size: n, node, placement_rule, instance: n, rails });
    }

    #[test]
    fn headers_round_trip(version: u16, op: u16, id: u64, flags: u16, status: u16, body_len: u32, payload_len: u32) {
        let op = FrameOp::from_code(op);
        let header = FrameHeader { version, op, id, flags: FrameFlags(flags), status, body_len, payload_len };
        prop_assert_eq!(FrameHeader::decode(&header.encode()).unwrap(), header);
        // The checks return a result for any header.
        let _ = header.check_request();
        let _ = header.check_answer(op, id);
        let _ = header.new_answer(status, body_len as usize, payload_len as usize);
    }

    #[test]
    fn errors_round_trip(code in 1u16.., message in ".{0,50}") {
        let mut body = Vec::new();
        encode_error_message(&Error::new(ErrorKind::from_code(code), message.as_str()), &mut body);
        let error = decode_error(code, &body);
        prop_assert_eq!((error.kind().code(), error.message()), (code, message.as_str()));
    }

    #[test]
    fn paths_lead_nowhere_else(parts in prop::collection::vec("[.a]{0,3}", 0..5)) {
        let path = parts.join("/");
        let good = path.is_empty() || !path.split('/').any(|part| matches!(part, "" | "." | ".."));
        prop_assert_eq!(check_path(path.as_bytes()).is_ok(), good);
    }
}

/// The loops of the fuzz targets over seeded random bytes, with plausible lengths.
#[test]
fn arbitrary_bytes_never_panic() {
    let mut state = 0x5eed_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let ops: Vec<FrameOp> = FrameOp::all_known().chain([FrameOp::Unknown(77)]).collect();
    for _ in 0..60_000 {
        let len = (random() % 200) as usize;
        let mut bytes: Vec<u8> = (0..len).map(|_| random() as u8).collect();
        // Small numbers at the positions of lengths exercise more of the decoders.
        for i in (0..len).step_by(1 + (random() % 7) as usize) {
            bytes[i] = (random() % 4) as u8;
        }
        for op in &ops {
            if let Ok(request) = NodeRequest::decode(*op, &bytes) {
                let mut out = Vec::new();
                request.encode(1, &mut out).unwrap();
                let request_len = out.len() - HEADER_LEN - frame_padding(bytes.len()).len();
                assert_eq!(&out[HEADER_LEN..HEADER_LEN + request_len], &bytes[..], "{request:?}");
            }
        }
        let _ = ObjectAttr::decode(&bytes);
        let _ = ListPage::decode(&bytes);
        let _ = WelcomeAnswer::decode(&bytes);
        let _ = CapacityAnswer::decode(&bytes);
        let _ = RangesDone::decode(&bytes);
        let _ = WriteAnswer::decode(&bytes);
        decode_error(random() as u16, &bytes);
        if let Some(head) = bytes.first_chunk() {
            let _ = FrameHeader::decode(head);
        }
        let _ = FrameHeader::check_start(&bytes);
    }
}

#[test]
fn limits_hold() {
    let path = vec![b'a'; MAX_REQUEST_BODY];
    let mut out = b"kept".to_vec();
    let too_long = NodeRequest::Lookup { volume: VolumeId(1), path: &path, max_age_ms: 0 }.encode(1, &mut out);
    assert!(matches!(too_long, Err(FrameError::TooLong { .. })) && out == b"kept");
    let (part, mut list) = (ObjectRange { path: b"a", version: "v", size: 1, offset: 0, len: 1 }, RangeList::default());
    while list.push(&part) {}
    assert!(list.len() > 1000);
    assert!(
        NodeRequest::Warm { volume: VolumeId(1), verify: true, parts: list.as_ranges() }.encode(1, &mut out).is_ok()
    );
    let request = FrameHeader::new_request(FrameOp::Read, 1, 0);
    assert!(request.new_answer(0, 0, MAX_PAYLOAD).is_ok() && request.new_answer(0, 0, MAX_PAYLOAD + 1).is_err());
    assert!(FrameHeader { payload_len: 1, ..request }.check_request().is_err());
    for op in [FrameOp::Write, FrameOp::Store, FrameOp::Stage] {
        let write = FrameHeader::new_request(op, 1, 0);
        assert!(FrameHeader { payload_len: MAX_WRITE as u32, ..write }.check_request().is_ok());
        assert!(FrameHeader { payload_len: MAX_WRITE as u32 + 1, ..write }.check_request().is_err());
    }
    let call = vec![7; MAX_STAGE_CALL + 1];
    assert!(NodeRequest::Stage(StageRequest { call: &call[1..], payload: &[] }).encode(1, &mut out).is_ok());
    assert!(NodeRequest::Stage(StageRequest { call: &call, payload: &[] }).encode(1, &mut out).is_err());
    assert!(FrameHeader { version: 0, ..request }.check_request().is_err());
    // A count of more entries than there are bytes does not make the decoder allocate for them.
    assert!(ListPage::decode(&[0xff, 0xff, 0xff, 0xff, 0]).is_err());
    // Times and kinds without a meaning.
    let mut body = Vec::new();
    let attr =
        ObjectAttr { kind: FileKind::File, size: 1, mtime: UNIX_EPOCH, mode: 0, version: Version::new(""), etag: None };
    attr.encode(&mut body);
    for (at, byte) in [(0, 9u8), (18, 0x80), (22, 0xff)] {
        let mut damaged = body.clone();
        damaged[at] = byte;
        assert!(ObjectAttr::decode(&damaged).is_err() || at == 18, "byte {at}");
    }
    // Names that would lead outside.
    for name in ["", ".", "..", "a/b", "a\0"] {
        let page =
            ListPage { entries: vec![DirEntry { name: name.into(), attr: attr.clone() }], next: None, marker: None };
        let mut body = Vec::new();
        page.encode(&mut body);
        assert!(matches!(ListPage::decode(&body), Err(FrameError::Path(_))), "{name:?}");
    }
    let hello =
        |min_version, max_version| HelloRequest { min_version, max_version, peer: "", source: "" }.negotiate_version();
    assert_eq!((hello(3, 3), hello(1, 3), hello(3, 10)), (Ok(3), Ok(3), Ok(9)));
    assert!(hello(1, 2).is_err() && hello(10, 10).is_err() && hello(0, 0).is_err() && hello(9, 3).is_err());
}

#[test]
fn a_welcome_lists_rails_within_its_limit() {
    let (node, address) = ("n".to_owned(), "10.0.0.1".parse().unwrap());
    let rail = RailInfo {
        name: "ib0".to_owned(),
        address,
        prefix_len: 24,
        port: 7471,
        link: RailLink::InfiniBand,
        fabric: 0xfe80 << 48,
        speed_mbit: 400_000,
    };
    let new =
        WelcomeAnswer { version: 3, node, instance: 7, rails: vec![rail; MAX_RAILS + 1], ..WelcomeAnswer::default() };
    let bytes = |welcome: &WelcomeAnswer| {
        let mut out = Vec::new();
        welcome.encode(&mut out);
        out
    };
    let mut long = bytes(&new);
    let whole = WelcomeAnswer::decode(&long).unwrap();
    assert_eq!((whole.instance, whole.rails.len()), (7, MAX_RAILS), "no more than a peer accepts");
    assert!(
        whole.rails[0].to_string().contains("ib0 (InfiniBand 10.0.0.1/24, subnet prefix fe80000000000000, 400 Gb/s)")
    );
    // An invalid count, network and address.
    let at = long.iter().rposition(|b| *b == MAX_RAILS as u8).unwrap();
    long[at] = MAX_RAILS as u8 + 1;
    assert!(matches!(WelcomeAnswer::decode(&long), Err(FrameError::TooLong { .. })));
}

/// Numbers on the wire never change meaning: a recorded frame still decodes the same.
#[test]
fn the_format_is_what_it_was() {
    let mut out = Vec::new();
    let read = ReadRequest {
        volume: VolumeId(2),
        path: b"a/b",
        version: "v",
        size: 9,
        offset: 4,
        len: 5,
        flags: ReadFlags::CACHED_ONLY.with(ReadFlags::BEGIN_FETCH),
    };
    NodeRequest::Read(read).encode(0x0102, &mut out).unwrap();
    let mut expected = b"SPUR\x01\x00\x13\x00\x02\x01\0\0\0\0\0\0\0\0\0\0\x25\0\0\0\0\0\0\0".to_vec();
    expected.resize(HEADER_LEN, 0);
    expected.extend_from_slice(b"\x02\0\0\0\x05\0\0\0\x04\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0\x06\x01\0\0\0v\x03\0\0\0a/b");
    expected.resize(2 * HEADER_LEN, 0);
    assert_eq!(out, expected);
    // Flags without a meaning.
    let at = HEADER_LEN + 24;
    assert_eq!(out[at], 6);
    assert!(matches!(
        NodeRequest::decode(FrameOp::Read, &[&out[HEADER_LEN..at], &[8]].concat()),
        Err(FrameError::Value { .. })
    ));
    for op in FrameOp::all_known() {
        assert_eq!(FrameOp::from_code(op.code()), op);
    }
}
