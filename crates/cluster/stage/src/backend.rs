//! The store of a node, with the staged objects above: the interface to a bucket that the origin and the writers of mounts use.
//!
//! | a change | is staged |
//! |---|---|
//! | of a writer that asks for that ([`ObjectAttributes::set_stage`]), or below a folder with such a rule | yes |
//! | of a name that has a staged object | yes, so that there is a single order |
//! | of a hidden name, with the request of a writer: a part of an open file | yes, and never uploaded |
//! | of another hidden name, any other | no |
//!
//! A lookup asks the leader first and the store then: an object that is uploaded in between is found twice, and never missed.

mod listing;
mod parts;

use crate::manifest::{BucketKey, KeptAttributes, Manifest, StageClass, staged_mark};
use crate::message::{
    Answer, CopyCall, KnownName, Located, NewObject, Reply, SavedName, StageCall, StageReply, unexpected,
};
use crate::service::{StageService, StageSlot};
use crate::shared::{new_name, stale, text_of};
use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parts::StagedUpload;
use spurline_object_store::{
    AnswerProgress, CopySource, HIDDEN_NAME, ObjectAttributes, ObjectBackend, ObjectBody, ObjectWriteBackend, RawBody,
    RawObject, RawPage, RequestFailure, StoredObject, UploadedPart, WriteCondition, bare_etag, mark_in, marked_as,
};
use spurline_types::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Objects up to this length lie beside their manifests.
const INLINE_MAX: u64 = 64 << 10;

/// Which objects are staged by the rules of folders.
pub type ClassOf = dyn Fn(&str) -> Option<StageClass> + Send + Sync;

/// See the head of this file.
pub struct StagedBackend {
    inner: Box<dyn ObjectBackend>,
    stage: Arc<StageSlot>,
    bucket: Arc<str>,
    class_of: Arc<ClassOf>,
}

impl StagedBackend {
    /// The store `inner` of `bucket`, with what `stage` has above. `class_of` knows the rules by key.
    pub fn new(
        inner: Box<dyn ObjectBackend>,
        stage: Arc<StageSlot>,
        bucket: &str,
        class_of: Arc<ClassOf>,
    ) -> StagedBackend {
        StagedBackend { inner, stage, bucket: bucket.into(), class_of }
    }

    fn at(&self, key: &str) -> BucketKey {
        BucketKey::new(&self.bucket, key)
    }

    fn store(&self) -> Answer<&dyn ObjectWriteBackend> {
        self.inner.writes().ok_or_else(|| {
            RequestFailure::fatal(ErrorKind::ReadOnly, format!("{} can't be changed", self.inner.describe()))
        })
    }

    /// Runs what waits for nodes on a thread of its own.
    async fn run_apart<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Arc<StageService>) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        let service = Arc::clone(self.stage.service()?);
        let ran = tokio::task::spawn_blocking(move || work(&service)).await;
        ran.unwrap_or_else(|_| Err(RequestFailure::transient(ErrorKind::Unavailable, "the node ends".to_owned())))
    }

    async fn ask(&self, call: StageCall, bytes: Bytes) -> Answer<Reply> {
        self.run_apart(move |service| service.ask_leader(&call, &bytes)).await
    }

    async fn find(&self, key: &str) -> Answer<KnownName> {
        if !self.stage.is_in_use()? {
            return Ok(KnownName::Unknown);
        }
        match self.ask(StageCall::Find(self.at(key)), Bytes::new()).await?.reply {
            StageReply::Known(known) => Ok(known),
            other => Err(unexpected(&other)),
        }
    }

    async fn locate(&self, key: &str, etag: &str) -> Answer<Located> {
        let at = self.at(key);
        let etag = bare_etag(etag).to_owned();
        self.run_apart(move |service| service.locate(&at, &etag)).await
    }

    /// The version of the store for a version of the group; `None` while the object is staged.
    async fn real_version(&self, key: &str, etag: &str) -> Answer<Option<String>> {
        match self.locate(key, etag).await? {
            Located::Here(_) => Ok(None),
            Located::Saved(real) => Ok(Some(real)),
            Located::Unknown => {
                let found = self.store()?.head_all(key).await.map_err(|failure| match failure.error.kind() {
                    ErrorKind::NotFound => stale(&self.at(key)),
                    _ => failure,
                })?;
                let is_same = mark_in(&found.attributes).is_some_and(|mark| staged_mark(etag) == Some(mark));
                let real = found.raw.etag.filter(|_| is_same).ok_or_else(|| stale(&self.at(key)))?;
                Ok(Some(bare_etag(&real).to_owned()))
            }
        }
    }

    /// How long a new object stays with the group; `None` for an object of the store. The attribute that asks is taken out.
    async fn class_for(&self, key: &str, attributes: &mut ObjectAttributes) -> Answer<Option<StageClass>> {
        let asked = attributes.take_stage();
        if is_hidden(key) {
            return Ok(asked.then_some(StageClass::Part));
        }
        if let Some(class) = (self.class_of)(key) {
            return Ok(Some(class));
        }
        if asked {
            return Ok(Some(StageClass::Staged));
        }
        let known = self.find(key).await?;
        Ok(matches!(known, KnownName::Object(_) | KnownName::Removing).then_some(StageClass::Staged))
    }

    /// A condition for the store.
    async fn real_condition(&self, key: &str, condition: &WriteCondition) -> Answer<WriteCondition> {
        match condition {
            WriteCondition::Version(etag) if staged_mark(etag).is_some() => {
                let real = self.real_version(key, etag).await?.ok_or_else(|| stale(&self.at(key)))?;
                Ok(WriteCondition::Version(real))
            }
            other => Ok(other.clone()),
        }
    }

    async fn commit(&self, new: NewObject, inline: Bytes) -> Answer<String> {
        text_of(self.ask(StageCall::Commit(new), inline).await?)
    }
}

/// Whether listings hide the name.
fn is_hidden(key: &str) -> bool {
    key.split('/').any(|part| part.starts_with(HIDDEN_NAME))
}

fn time_at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn raw_of(manifest: &Manifest) -> RawObject {
    RawObject {
        key: manifest.at.key.clone(),
        size: manifest.size,
        mtime: time_at(manifest.closed_s),
        etag: Some(manifest.etag()),
    }
}

/// The object under the version that readers know.
fn known_as(mut object: RawObject, saved: &SavedName) -> RawObject {
    if object.etag.as_deref().map(bare_etag) == Some(&saved.real) {
        object.etag = Some(saved.etag.clone());
        object.mtime = saved.closed_s.map_or(object.mtime, time_at);
    }
    object
}

/// The attributes with a mark: a call without an answer is sent again, and is known by the mark.
fn marked(attributes: ObjectAttributes) -> ObjectAttributes {
    match mark_in(&attributes) {
        Some(_) => attributes,
        None => marked_as(attributes, &new_name()),
    }
}

fn not_found(key: &str) -> RequestFailure {
    RequestFailure::fatal(ErrorKind::NotFound, format!("there is no object '{key}'"))
}

impl ObjectBackend for StagedBackend {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn try_clone(&self) -> Option<Box<dyn ObjectBackend>> {
        let inner = self.inner.try_clone()?;
        let stage = Arc::clone(&self.stage);
        let class_of = Arc::clone(&self.class_of);
        Some(Box::new(StagedBackend { inner, stage, bucket: Arc::clone(&self.bucket), class_of }))
    }

    fn writes(&self) -> Option<&dyn ObjectWriteBackend> {
        self.inner.writes().map(|_| self as &dyn ObjectWriteBackend)
    }

    fn uses_sockets(&self) -> bool {
        self.inner.uses_sockets()
    }

    fn attach_runtime(&self, shared: &tokio::runtime::Handle) {
        self.inner.attach_runtime(shared);
    }

    fn list<'a>(&'a self, prefix: &'a str, token: Option<&'a str>, max: usize) -> BoxFuture<'a, Answer<RawPage>> {
        async move {
            let list = async |token: Option<String>| self.inner.list(prefix, token.as_deref(), max).await;
            self.list_merged(prefix, token, true, list).await
        }
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<RawObject>> {
        async move {
            match self.find(key).await? {
                KnownName::Object(manifest) => Ok(raw_of(&manifest)),
                KnownName::Removing => Err(not_found(key)),
                KnownName::Saved(saved) => Ok(known_as(self.inner.head(key).await?, &saved)),
                KnownName::Unknown | KnownName::Folder if self.is_scratch(key) => Err(not_found(key)),
                KnownName::Unknown | KnownName::Folder => self.inner.head(key).await,
            }
        }
        .boxed()
    }

    fn get<'a>(&'a self, key: &'a str, from: u64, to: u64, etag: Option<&'a str>) -> BoxFuture<'a, Answer<RawBody>> {
        async move {
            let Some(etag) = etag else {
                return match self.find(key).await? {
                    KnownName::Object(manifest) => self.body_of(*manifest, from, to),
                    KnownName::Removing => Err(not_found(key)),
                    KnownName::Saved(saved) => self.get_saved(key, from, to, &saved.real, &saved.etag).await,
                    KnownName::Unknown | KnownName::Folder => self.inner.get(key, from, to, None).await,
                };
            };
            if staged_mark(etag).is_none() {
                return self.inner.get(key, from, to, Some(etag)).await;
            }
            if let Located::Here(manifest) = self.locate(key, etag).await? {
                return self.body_of(*manifest, from, to);
            }
            match self.real_version(key, etag).await? {
                Some(real) => self.get_saved(key, from, to, &real, etag).await,
                None => {
                    Err(RequestFailure::transient(ErrorKind::Unavailable, "the object has just been staged".to_owned()))
                }
            }
        }
        .boxed()
    }
}

impl StagedBackend {
    fn is_scratch(&self, key: &str) -> bool {
        matches!((self.class_of)(key), Some(StageClass::Scratch { .. }))
    }

    /// Bytes of an object of the store, under the version that readers know.
    async fn get_saved(&self, key: &str, from: u64, to: u64, real: &str, etag: &str) -> Answer<RawBody> {
        let mut body = self.inner.get(key, from, to, Some(real)).await?;
        body.etag = body.etag.map(|found| if bare_etag(&found) == real { etag.to_owned() } else { found });
        Ok(body)
    }
}

impl ObjectWriteBackend for StagedBackend {
    fn head_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<StoredObject>> {
        async move {
            match self.find(key).await? {
                KnownName::Object(manifest) => {
                    let mut attributes = ObjectAttributes::from(&manifest.attributes);
                    // The store does not have the object.
                    attributes.set_stage();
                    Ok(StoredObject { raw: raw_of(&manifest), attributes })
                }
                KnownName::Removing => Err(not_found(key)),
                KnownName::Saved(saved) => {
                    let StoredObject { raw, attributes } = self.store()?.head_all(key).await?;
                    Ok(StoredObject { raw: known_as(raw, &saved), attributes })
                }
                KnownName::Unknown | KnownName::Folder if self.is_scratch(key) => Err(not_found(key)),
                KnownName::Unknown | KnownName::Folder => self.store()?.head_all(key).await,
            }
        }
        .boxed()
    }

    fn list_below<'a>(&'a self, prefix: &'a str, token: Option<&'a str>) -> BoxFuture<'a, Answer<RawPage>> {
        async move {
            let list = async |token: Option<String>| self.store()?.list_below(prefix, token.as_deref()).await;
            self.list_merged(prefix, token, false, list).await
        }
        .boxed()
    }

    fn read_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<(Vec<u8>, String)>> {
        async move {
            let manifest = match self.find(key).await? {
                KnownName::Object(manifest) => manifest,
                KnownName::Removing => return Err(not_found(key)),
                KnownName::Saved(saved) => {
                    let (bytes, etag) = self.store()?.read_all(key).await?;
                    let is_same = bare_etag(&etag) == saved.real;
                    return Ok((bytes, if is_same { saved.etag } else { etag }));
                }
                KnownName::Unknown | KnownName::Folder => return self.store()?.read_all(key).await,
            };
            let etag = manifest.etag();
            let bytes = self.run_apart(move |service| service.shared().read_manifest(&manifest)).await?;
            Ok((bytes.to_vec(), etag))
        }
        .boxed()
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: ObjectBody,
        attributes: &'a ObjectAttributes,
        condition: &'a WriteCondition,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let mut attributes = attributes.clone();
            let Some(class) = self.class_for(key, &mut attributes).await? else {
                let condition = self.real_condition(key, condition).await?;
                return self.store()?.put(key, body, &attributes, &condition).await;
            };
            let size: u64 = body.pieces().iter().map(|piece| piece.len() as u64).sum();
            let attributes = marked(attributes);
            let mut new = NewObject {
                at: self.at(key),
                attributes: KeptAttributes::from(&attributes),
                condition: condition.into(),
                class,
                size,
                pieces: Vec::new(),
            };
            if size <= INLINE_MAX {
                return self.commit(new, body.bytes()).await;
            }
            let upload = StagedUpload::of_call(new.attributes.clone(), class);
            let committed = async {
                new.pieces.push(self.place(&upload, body.pieces().to_vec()).await?);
                self.commit(new, Bytes::new()).await
            };
            let committed = committed.await;
            if committed.is_err() {
                self.drop_upload(upload.id);
            }
            committed
        }
        .boxed()
    }

    fn begin_upload<'a>(&'a self, key: &'a str, attributes: &'a ObjectAttributes) -> BoxFuture<'a, Answer<String>> {
        async move {
            let mut attributes = attributes.clone();
            match self.class_for(key, &mut attributes).await? {
                Some(class) => Ok(StagedUpload::new(KeptAttributes::from(&marked(attributes)), class).to_id()),
                None => self.store()?.begin_upload(key, &attributes).await,
            }
        }
        .boxed()
    }

    fn upload_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        body: ObjectBody,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let Some(upload) = StagedUpload::from_id(upload)? else {
                return self.store()?.upload_part(key, upload, number, body).await;
            };
            parts::etag_of(&self.place(&upload, body.pieces().to_vec()).await?)
        }
        .boxed()
    }

    fn copy_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        from: CopySource<'a>,
        range: Range<u64>,
    ) -> BoxFuture<'a, Answer<String>> {
        self.copy_any_part(key, upload, number, from, range).boxed()
    }

    fn complete<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        parts: &'a [UploadedPart],
        condition: &'a WriteCondition,
        progress: &'a AnswerProgress,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let Some(staged) = StagedUpload::from_id(upload)? else {
                let condition = self.real_condition(key, condition).await?;
                return self.store()?.complete(key, upload, parts, &condition, progress).await;
            };
            let pieces = parts.iter().map(|part| parts::piece_of(&part.etag)).collect::<Answer<Vec<_>>>()?;
            let new = NewObject {
                at: self.at(key),
                attributes: staged.attributes,
                condition: condition.into(),
                class: staged.class,
                size: pieces.iter().map(crate::manifest::Piece::size).sum(),
                pieces,
            };
            self.commit(new, Bytes::new()).await
        }
        .boxed()
    }

    fn abort<'a>(&'a self, key: &'a str, upload: &'a str) -> BoxFuture<'a, Answer<()>> {
        async move {
            let Some(staged) = StagedUpload::from_id(upload)? else { return self.store()?.abort(key, upload).await };
            // The group may have taken the object although the writer got no answer.
            let is_taken = match self.find(key).await {
                Ok(KnownName::Object(manifest)) => Some(&manifest.mark) == staged.attributes.mark().as_ref(),
                found => found.is_err(),
            };
            if !is_taken {
                self.drop_upload(staged.id);
            }
            Ok(())
        }
        .boxed()
    }

    fn copy<'a>(
        &'a self,
        from: CopySource<'a>,
        to: &'a str,
        attributes: Option<&'a ObjectAttributes>,
        condition: &'a WriteCondition,
        work_time: Duration,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let mut attributes = attributes.cloned();
            if let Some(attributes) = &mut attributes {
                attributes.take_stage();
            }
            if !self.stage.is_in_use()? {
                return self.store()?.copy(from, to, attributes.as_ref(), condition, work_time).await;
            }
            let kept = attributes.map(|attributes| KeptAttributes::from(&marked(attributes)));
            let call = StageCall::Copy(CopyCall {
                from: self.at(from.key),
                etag: from.etag.map(|etag| bare_etag(etag).to_owned()),
                to: self.at(to),
                attributes: kept,
                mark: new_name(),
                condition: condition.into(),
                work_time,
            });
            text_of(self.ask(call, Bytes::new()).await?)
        }
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a str, condition: &'a WriteCondition) -> BoxFuture<'a, Answer<()>> {
        async move {
            if !self.stage.is_in_use()? {
                return self.store()?.delete(key, condition).await;
            }
            let call = StageCall::Remove { at: self.at(key), condition: condition.into() };
            match self.ask(call, Bytes::new()).await?.reply {
                StageReply::Done => Ok(()),
                other => Err(unexpected(&other)),
            }
        }
        .boxed()
    }
}
