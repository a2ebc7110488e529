//! The rename of a folder, which a record makes one change: a mount that is killed at any step leaves a record, and the next one
//! completes the rename. It knows keys, and neither paths nor open files.
//!
//! 1. The record is written: what is renamed, in which versions.
//! 2. Each object is copied within the store, under the condition that nothing has its new name.
//! 3. The record says that all copies are there.
//! 4. Each object loses its old name, if it still has the version that was copied.
//! 5. The record is removed.
//!
//! A copy that fails undoes the rename: copies are removed, then the record. So a failed rename can be repeated.

use crate::found::{FoundObject, found_object};
use crate::rename::{CopyPlan, copy_object};
use crate::rename_record::{PhaseChange, RenamePhase, RenameRecord, RenamedObject};
use crate::requests::{BucketRequests, is_marked_as};
use crate::write_options::RenameRules;
use futures::{StreamExt as _, TryStreamExt as _};
use spurline_object_store::{StoredObject, WriteCondition, bare_etag};
use spurline_types::{Error, ErrorKind, Result};

/// Objects that are copied or removed at the same time.
const REQUESTS_AT_ONCE: usize = 16;

/// The mount that works on a rename.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RenameActor {
    /// The one that began it, for a program that waits.
    Began,
    /// A later one, that has found its record.
    Completes,
}

/// The rename of a folder under way.
pub(crate) struct FolderRename<'a> {
    requests: &'a BucketRequests,
    record: RenameRecord,
    actor: RenameActor,
    rules: RenameRules,
}

pub(crate) enum RenameEnd {
    Made(Vec<RenamedCopy>),
    /// For this reason, if it failed here.
    Undone(Option<Error>),
}

/// The object under its new name.
pub(crate) struct RenamedCopy {
    pub object: RenamedObject,
    pub copy: FoundObject,
}

impl<'a> FolderRename<'a> {
    /// A rename that has just been recorded.
    pub fn of_new_record(requests: &'a BucketRequests, record: RenameRecord, rules: RenameRules) -> Self {
        FolderRename { requests, record, actor: RenameActor::Began, rules }
    }

    /// Makes the rename, or undoes it.
    ///
    /// # Errors
    /// The store's: the rename is neither made nor undone, and its record stays.
    pub async fn run(&mut self) -> Result<RenameEnd> {
        let mut copies = Vec::new();
        let mut failure = None;
        loop {
            match self.record.phase() {
                RenamePhase::Copying => {
                    let next = match self.copy_all().await {
                        Ok(copied) => {
                            copies = copied;
                            RenamePhase::Copied
                        }
                        // The record stays, and a later start tries again.
                        Err(error) if self.actor == RenameActor::Completes => return Err(error),
                        Err(error) => {
                            failure = Some(error);
                            RenamePhase::Undoing
                        }
                    };
                    let objects = match next {
                        RenamePhase::Copied => copies.iter().map(|renamed| renamed.object.clone()).collect(),
                        _ => self.record.objects().to_vec(),
                    };
                    let entered = self.record.enter(self.requests, next, objects).await;
                    if entered.map_err(|error| self.left_behind(error))? == PhaseChange::Ended {
                        return Ok(match failure {
                            None => RenameEnd::Made(copies),
                            failure => RenameEnd::Undone(failure),
                        });
                    }
                }
                RenamePhase::Copied => {
                    let removed = self.remove_all(&self.record, true).await;
                    removed.map_err(|error| self.left_behind(error))?;
                    self.record.remove(self.requests).await?;
                    return Ok(RenameEnd::Made(copies));
                }
                RenamePhase::Undoing => {
                    let removed = self.remove_all(&self.record, false).await;
                    removed.map_err(|error| self.left_behind(error))?;
                    self.record.remove(self.requests).await?;
                    return Ok(RenameEnd::Undone(failure));
                }
            }
        }
    }

    /// The error of a rename that is neither made nor undone.
    fn left_behind(&self, error: Error) -> Error {
        let why = format!(
            "{} is not complete: the next mount with --rw completes it, and until then files can have both names",
            self.record.describe()
        );
        tracing::error!("{why}: {error}");
        error.context(why)
    }

    /// Copies all objects that are not copied yet.
    async fn copy_all(&self) -> Result<Vec<RenamedCopy>> {
        let copies = self.record.objects().iter().map(|object| self.copy_one(object));
        let copied: Vec<Option<RenamedCopy>> =
            futures::stream::iter(copies).buffered(REQUESTS_AT_ONCE).try_collect().await?;
        Ok(copied.into_iter().flatten().collect())
    }

    /// Copies an object; `None` for one that is not renamed, because another program has changed it or has made its new name.
    async fn copy_one(&self, object: &RenamedObject) -> Result<Option<RenamedCopy>> {
        let old_key = self.record.old_key(object);
        let new_key = self.record.new_key(object);
        if self.actor == RenameActor::Completes
            && let Some(copy) = self.find_copy(&new_key).await?
        {
            return Ok(Some(RenamedCopy { object: object.clone(), copy }));
        }
        let plan = CopyPlan {
            old_key: &old_key,
            new_key: &new_key,
            etag: object.etag.as_deref(),
            mark: self.record.mark(),
            condition: if self.rules.guarded { &WriteCondition::Absent } else { &WriteCondition::None },
            keeps_mtime: self.rules.keeps_mtime,
        };
        let error = match copy_object(self.requests, &plan).await {
            Ok(copied) => return Ok(Some(RenamedCopy { object: object.clone(), copy: copied.found })),
            Err(error) => error,
        };
        if !matches!(error.kind(), ErrorKind::Stale | ErrorKind::NotFound) {
            return Err(error);
        }
        // Another mount has made the copy, and perhaps removed the source already.
        if let Some(copy) = self.find_copy(&new_key).await? {
            return Ok(Some(RenamedCopy { object: object.clone(), copy }));
        }
        match (self.head(&new_key).await?, self.actor) {
            // Both folders had a marker; the new one stays.
            (Some(there), _) if object.is_marker() => {
                Ok(Some(RenamedCopy { object: object.clone(), copy: found_object(there) }))
            }
            (Some(_), RenameActor::Began) => {
                let why = format!("'{new_key}' was made by another writer during the rename");
                Err(Error::new(ErrorKind::Io(libc::EEXIST), why))
            }
            _ => {
                tracing::warn!(
                    "'{old_key}' keeps its name in {}, because another program has changed it or '{new_key}'",
                    self.record.describe()
                );
                Ok(None)
            }
        }
    }

    /// The copy that this rename has made.
    async fn find_copy(&self, new_key: &str) -> Result<Option<FoundObject>> {
        let found = self.head(new_key).await?;
        Ok(found.filter(|found| is_marked_as(&found.attributes, self.record.mark())).map(found_object))
    }

    async fn head(&self, key: &str) -> Result<Option<StoredObject>> {
        match self.requests.head(key).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes the old names of all objects, or with `old_names` false the new ones. An object is removed only if the other name
    /// has it too.
    async fn remove_all(&self, record: &RenameRecord, old_names: bool) -> Result<()> {
        let removals = record.objects().iter().map(|object| async move {
            if old_names { self.remove_old(object).await } else { self.remove_copy(object).await }
        });
        futures::stream::iter(removals).buffered(REQUESTS_AT_ONCE).try_collect::<Vec<()>>().await.map(drop)
    }

    async fn remove_old(&self, object: &RenamedObject) -> Result<()> {
        let old_key = self.record.old_key(object);
        // The mount that has just made the copy needs no proof.
        if self.actor == RenameActor::Completes && self.head(&self.record.new_key(object)).await?.is_none() {
            tracing::warn!("'{old_key}' keeps its name in {}: the new name is gone", self.record.describe());
            return Ok(());
        }
        match self.requests.delete(&old_key, &self.version_condition(object.etag.as_deref())).await {
            Err(error) if error.kind() == ErrorKind::Stale => {
                tracing::warn!("'{old_key}' keeps its name in {}: {error}", self.record.describe());
                Ok(())
            }
            removed => removed,
        }
    }

    async fn remove_copy(&self, object: &RenamedObject) -> Result<()> {
        let new_key = self.record.new_key(object);
        let Some(copy) = self.find_copy(&new_key).await? else { return Ok(()) };
        if self.head(&self.record.old_key(object)).await?.is_none() {
            return Ok(());
        }
        match self.requests.delete(&new_key, &self.version_condition(copy.attr.etag.as_deref().map(bare_etag))).await {
            Err(error) if error.kind() == ErrorKind::Stale => Ok(()),
            removed => removed,
        }
    }

    fn version_condition(&self, etag: Option<&str>) -> WriteCondition {
        match etag {
            Some(etag) if self.rules.guarded => WriteCondition::Version(etag.to_owned()),
            _ => WriteCondition::None,
        }
    }
}

/// Completes the renames that other mounts have left behind. One that fails stays for the next start.
pub(crate) async fn complete_renames(requests: &BucketRequests, root: &str, rules: RenameRules) {
    let keys = match RenameRecord::find_all(requests, root).await {
        Ok(keys) => keys,
        Err(error) => {
            tracing::warn!("renames that are not complete can't be looked for: {error}");
            return;
        }
    };
    for key in keys {
        if let Err(error) = complete_rename(requests, &key, rules).await {
            tracing::warn!("a rename that was left behind is not complete yet: {error}; the next mount tries again");
        }
    }
}

async fn complete_rename(requests: &BucketRequests, key: &str, rules: RenameRules) -> Result<()> {
    let Some(record) = RenameRecord::load(requests, key).await? else { return Ok(()) };
    let what = record.describe();
    let mut rename = FolderRename { requests, record, actor: RenameActor::Completes, rules };
    match rename.run().await? {
        RenameEnd::Undone(_) => tracing::info!("{what}, which had failed, is undone"),
        RenameEnd::Made(_) => tracing::info!("{what}, which another mount had left behind, is complete"),
    }
    Ok(())
}
