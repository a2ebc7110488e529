//! Jobs in a real etcd, shared by two stores that could both run them.

use crate::common;
use common::wait_for;
use spurline_membership::url::RegistryUrl;
use spurline_membership::{ActiveJob, BeginResult, JobStore, StoredJob};
use spurline_testkit::EtcdServer;
use spurline_types::ErrorKind;
use std::sync::Arc;

fn open(server: &EtcdServer, owner: &str) -> Arc<JobStore> {
    let Ok(RegistryUrl::Etcd(url)) = server.url().parse() else { panic!("{} is no etcd", server.url()) };
    let mut opened = None;
    // It listens before it answers.
    wait_for("etcd", || {
        opened = JobStore::open(&url, owner).ok();
        opened.is_some()
    });
    opened.unwrap()
}

fn job(spec: &str, state: &str) -> StoredJob {
    StoredJob { spec: spec.into(), state: state.into() }
}

#[test]
fn a_job_is_done_by_one_and_goes_on_with_the_other() {
    if !EtcdServer::is_installed() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = EtcdServer::start(dir.path(), 0, "http", &[]).unwrap();
    let (a, b) = (open(&server, "a"), open(&server, "b"));
    let now = |store: &JobStore, id: &str| store.active_jobs().unwrap().get(&("g".to_owned(), id.to_owned())).cloned();
    let new = job("what", "0");
    assert_eq!(a.begin_job("g", "j", &new).unwrap(), BeginResult::Mine);
    assert_eq!(b.begin_job("g", "j", &job("other", "0")).unwrap(), BeginResult::Elsewhere(new));
    assert_eq!(b.claim_job("g", "j").unwrap(), None);
    assert!(a.save_state("g", "j", b"1", false).unwrap());
    assert!(!b.save_state("g", "j", b"9", false).unwrap(), "it is not b's");
    assert_eq!(b.read_job("g", "j").unwrap(), Some(job("what", "1")));
    assert!(b.stop("g", "j").unwrap() && !b.stop("g", "none").unwrap());
    let seen = ActiveJob { open: true, owned: true, mine: true, stop: true };
    assert_eq!(now(&a, "j"), Some(seen.clone()));
    assert_eq!(now(&b, "j"), Some(ActiveJob { mine: false, ..seen }));
    // A released job is free at once.
    a.close_store();
    assert_eq!(a.save_state("g", "j", b"2", false).unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(b.claim_job("g", "j").unwrap(), Some(job("what", "1")));
    assert!(b.save_state("g", "j", b"end", true).unwrap());
    assert_eq!(now(&b, "j"), None);
    assert_eq!((b.claim_job("g", "j").unwrap(), b.stop("g", "j").unwrap()), (None, false));
    let ended = [("j".to_owned(), job("what", "end"))];
    assert_eq!((b.list_jobs("g", "").unwrap(), b.list_jobs("g", "j").unwrap()), (ended.to_vec(), ended.to_vec()));
    assert_eq!(b.list_jobs("g", "i").unwrap(), []);
    // An ended job can be begun anew by any store.
    let c = open(&server, "c");
    assert_eq!(c.begin_job("g", "j", &job("what", "0")).unwrap(), BeginResult::Mine);
    c.release_job("g", "j").unwrap();
    assert_eq!(b.claim_job("g", "j").unwrap(), Some(job("what", "0")));
    let large = StoredJob { spec: vec![b'x'; 2 << 20], state: Vec::new() };
    assert!(b.begin_job("g", "large", &large).unwrap_err().message().contains("split its list"));
    // The last word fits whatever both parts are together, with what it is to do left as it is.
    let [spec, state] = [600 << 10, JobStore::MAX_JOB_BYTES].map(|bytes| vec![b'x'; bytes]);
    let large = StoredJob { spec: spec.clone(), state: b"0".to_vec() };
    assert_eq!(b.begin_job("g", "large", &large).unwrap(), BeginResult::Mine);
    assert!(b.save_state("g", "large", &state, false).unwrap() && b.save_state("g", "large", &state, true).unwrap());
    assert_eq!((now(&b, "large"), b.read_job("g", "large").unwrap()), (None, Some(StoredJob { spec, state })));
    // Without etcd no store may take the job for its own.
    drop(server);
    wait_for("the lease to be over", || !b.holds_lease());
}
