//! What places below one source cost: in a program of its own, as it counts its threads and descriptors.

use spurline_object_store::{EnvironmentSource, OriginOptions, SharedBuckets};
use spurline_origin::{OriginStore, open};
use spurline_types::Stats;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Threads and open descriptors.
fn cost() -> [usize; 2] {
    ["/proc/self/task", "/proc/self/fd"].map(|list| std::fs::read_dir(list).unwrap().count())
}

#[test]
fn many_places_of_one_bucket_cost_no_more_threads_and_connections_than_one() {
    let config = OriginOptions {
        endpoint: Some("http://127.0.0.1:9".into()),
        anonymous: true,
        env: EnvironmentSource::fixed([]),
        shared_buckets: SharedBuckets::default(),
        net_threads: 3,
        ..OriginOptions::default()
    };
    let at_first = cost();
    let open = |place: &str| open(&format!("s3://{place}"), &config, Arc::new(Stats::default())).unwrap();
    let one = open("bucket/user-0");
    let with_one = cost();
    assert!(with_one[0] >= at_first[0] + 3);
    let many: Vec<Arc<dyn OriginStore>> = (1..200).map(|n| open(&format!("bucket/user-{n}"))).collect();
    assert_eq!(cost(), with_one);
    assert_eq!(many[41].source_url(), "s3://bucket/user-42");
    // Another bucket is another server's, perhaps.
    let other = open("other");
    assert!(cost()[0] >= with_one[0] + 3);
    drop((one, many, other));
    let until = Instant::now() + Duration::from_secs(20);
    while cost() != at_first {
        assert!(Instant::now() < until, "a closed bucket is kept: {:?}, {at_first:?} at first", cost());
        std::thread::sleep(Duration::from_millis(5));
    }
}
