//! The kernel for the file system of a session, in the form of the traits of `spurline-fs`. Exists from INIT on.

use crate::abi::{self, InHeader};
use crate::backing::{BackingRegistrar, RegisteredFile};
use crate::config::KeptSession;
use crate::kept_state::set_thread_request;
use crate::notify::KernelNotifier;
use crate::waiting::WaitingSlots;
use parking_lot::Mutex;
use spurline_fs::{
    BeginWait, CallerGroups, FileService, ForgetCandidate, FsCaller, FsResult, InodeLimiter, KeptLife, KeptRecords,
    KernelSide, KernelView, RegisterBacking, RegisteredBacking, RequestForgets, RequestNumber,
};
use spurline_types::{Error, ErrorKind};
use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Passthrough stops after this many consecutive refusals by the kernel: each attempt costs the volume the check of a
/// whole file.
const BACKING_REFUSALS_MAX: u32 = 8;

/// The kernel as negotiated at INIT.
pub(crate) struct NegotiatedKernel {
    /// Registers files that the kernel reads itself; `None` when that was not requested or the kernel has no support.
    pub(crate) backings: Option<BackingRegistrations>,
    /// Sends notifications.
    pub(crate) notifier: KernelNotifier,
    /// Keeps the session able to serve while requests wait for others.
    pub(crate) waiting: WaitingSlots,
    /// Requests that make something have the group of the directory, if the caller is a member.
    pub(crate) create_group: bool,
    /// Files that bypass the kernel's pages can be mapped.
    pub(crate) direct_mmap: bool,
}

/// The kernel's side of a session. Empty without INIT.
#[derive(Default)]
pub(crate) struct SessionKernel {
    negotiated: OnceLock<NegotiatedKernel>,
    inode_limiter: Mutex<Option<InodeLimiter>>,
}

impl SessionKernel {
    /// Begins the life of `service`, before the first request.
    ///
    /// With `kept`, the service continues with the inodes and handles of `takeovers` processes before.
    pub(crate) fn start<S: FileService>(&self, service: &Arc<S>, kernel: NegotiatedKernel, kept: Option<&KeptSession>) {
        if let Some(kept) = kept {
            let life = KeptLife {
                records: Arc::clone(&kept.state) as Arc<dyn KeptRecords>,
                files: kept.files.clone(),
                takeovers: kept.takeovers,
                ended_at: kept.ended_at,
                register: kernel.backings.as_ref().map(|backings| backings as &dyn RegisterBacking),
            };
            if !service.keep_life(&life) {
                tracing::error!("this kind of mount keeps no records for the time after its process");
            }
        }
        if kernel.direct_mmap {
            service.allow_direct_writes();
        }
        if let Some(inodes) = Arc::clone(service).limited_inodes() {
            match InodeLimiter::start(inodes, Box::new(KernelNames(kernel.notifier.clone()))) {
                Ok(limiter) => *self.inode_limiter.lock() = limiter,
                Err(error) => tracing::warn!("the memory for inodes has no limit: no thread: {error}"),
            }
        }
        let _ = self.negotiated.set(kernel);
    }

    /// Ends the life of `service`, after the last request.
    pub(crate) fn stop<S: FileService>(&self, service: &S) {
        let limiter = self.inode_limiter.lock().take();
        drop(limiter);
        // Before the session counts as ended: the session's end is also the end of waits for written bytes.
        service.close_all();
    }

    /// The kernel, for a request.
    pub(crate) fn side(&self) -> KernelSide<'_> {
        let Some(kernel) = self.negotiated.get() else { return KernelSide::default() };
        KernelSide {
            backings: kernel.backings.as_ref().and_then(BackingRegistrations::usable),
            view: Some(&kernel.notifier),
            waits: Some(&kernel.waiting),
        }
    }

    /// The caller of a request that makes something. `group`: the directory's group, if the request has one.
    pub(crate) fn creator(&self, header: &InHeader, umask: u32, group: Option<u32>) -> FsCaller<'static> {
        let knows_group = self.negotiated.get().is_some_and(|kernel| kernel.create_group);
        let groups = match group {
            _ if !knows_group => CallerGroups::Unknown,
            None => CallerGroups::NotOfDirectory,
            Some(group) => CallerGroups::OfDirectory(group),
        };
        FsCaller { umask, groups, ..caller_of(header) }
    }
}

/// The caller of a request.
pub(crate) fn caller_of(header: &InHeader) -> FsCaller<'static> {
    let InHeader { uid, gid, pid, unique, .. } = *header;
    let request = RequestNumber { number: unique & !abi::UNIQUE_RESENT, repeated: unique & abi::UNIQUE_RESENT != 0 };
    set_thread_request(request);
    FsCaller { uid, gid, pid, umask: 0, groups: CallerGroups::Unknown, request }
}

/// Registers files with the kernel, until too many refusals.
pub(crate) struct BackingRegistrations {
    registrar: BackingRegistrar,
    refused: AtomicU32,
}

impl BackingRegistrations {
    pub(crate) fn new(registrar: BackingRegistrar) -> Self {
        BackingRegistrations { registrar, refused: AtomicU32::new(0) }
    }

    /// The registration, unless the kernel refused too often.
    fn usable(&self) -> Option<&dyn RegisterBacking> {
        (self.refused.load(Ordering::Relaxed) < BACKING_REFUSALS_MAX).then_some(self as &dyn RegisterBacking)
    }

    fn register(&self, file: &File, user: Option<(u32, u32)>) -> io::Result<Box<dyn RegisteredBacking>> {
        match self.registrar.register_file(file.as_fd(), user) {
            Ok(backing) => {
                self.refused.store(0, Ordering::Relaxed);
                Ok(Box::new(backing))
            }
            Err(error) => {
                if self.refused.fetch_add(1, Ordering::Relaxed) + 1 == BACKING_REFUSALS_MAX {
                    tracing::warn!(
                        "the kernel refused {BACKING_REFUSALS_MAX} cached files for passthrough in a row: {error}; passthrough is off \
                         from now on, and reads go through this process. Passthrough needs CAP_SYS_ADMIN and a \
                         cache directory on a file system that is not itself stacked (overlayfs, FUSE)"
                    );
                }
                Err(error)
            }
        }
    }
}

impl RegisterBacking for BackingRegistrations {
    fn register_file(&self, file: &File) -> io::Result<Box<dyn RegisteredBacking>> {
        self.register(file, None)
    }

    fn register_file_as(&self, file: &File, uid: u32, gid: u32) -> io::Result<Box<dyn RegisteredBacking>> {
        self.register(file, Some((uid, gid)))
    }

    fn adopt_registration(&self, id: i32) -> Option<Box<dyn RegisteredBacking>> {
        Some(Box::new(self.registrar.adopt_file(id)))
    }
}

impl RegisteredBacking for RegisteredFile {
    fn backing_id(&self) -> i32 {
        RegisteredFile::id(self)
    }
}

impl KernelView for KernelNotifier {
    fn forget_attr(&self, ino: u64) -> io::Result<()> {
        self.invalidate_attr(ino)
    }

    fn drop_pages(&self, ino: u64) -> io::Result<()> {
        self.invalidate_pages(ino)
    }

    fn store_byte(&self, ino: u64, offset: u64, byte: u8) -> io::Result<()> {
        self.store_byte(ino, offset, byte)
    }
}

impl BeginWait for WaitingSlots {
    fn begin_wait(&self) -> FsResult<Box<dyn Any>> {
        self.begin_wait()
            .map(|slot| Box::new(slot) as _)
            .map_err(|errno| Error::new(ErrorKind::Io(errno.0), "no slot for a request that waits").into())
    }

    fn has_all_closes(&self, fh: u64) -> bool {
        self.has_no_release(fh)
    }
}

/// The kernel's names of inodes.
struct KernelNames(KernelNotifier);

impl RequestForgets for KernelNames {
    fn request_forgets(&self, inodes: &[ForgetCandidate]) -> io::Result<()> {
        if self.0.prune_inodes(inodes.iter().map(|inode| inode.ino))? {
            return Ok(());
        }
        // An older kernel would also take the path of a directory in which a program works: getcwd would fail there.
        for inode in inodes.iter().filter(|inode| !inode.directory) {
            if let Some(parent) = inode.parent {
                self.0.invalidate_entry(parent, &inode.name)?;
            }
        }
        Ok(())
    }
}
