//! Streams of a runtime: who gets to speak over them, with and without TLS.

use spurline_trust::{Tokens, Trust, accept, connect};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

const TOKEN: &str = "q5Ykm0WJ7b2uR1xTzv9sLd3f";
const OTHER: &str = "another-WJ7b2uR1xTzv9sLd3f";

fn with(token: &str, tls: bool) -> Arc<Trust> {
    let trust = Trust::with_tokens("somebody", Tokens::parse(token.as_bytes()).unwrap());
    if tls { trust.encrypted(None).unwrap() } else { trust }
}

/// Both ends' results; where both are good, a word passes each way.
fn meet(one: Arc<Trust>, other: Arc<Trust>) -> (Result<()>, Result<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async move {
        let (here, there) = duplex(64 << 10);
        let reader = async move {
            let mut stream = connect(here, &one, "10.0.0.1:7000").await?;
            let io = |e: std::io::Error| Error::io("speaking", &e);
            stream.write_all(b"ping").await.map_err(io)?;
            stream.flush().await.map_err(io)?;
            let mut word = [0; 4];
            stream.read_exact(&mut word).await.map_err(io)?;
            assert_eq!(&word, b"pong");
            Ok(())
        };
        let node = async move {
            let mut stream = accept(there, &other, "10.0.0.9:1").await?;
            let mut word = [0; 4];
            let io = |e: std::io::Error| Error::io("hearing", &e);
            stream.read_exact(&mut word).await.map_err(io)?;
            assert_eq!(&word, b"ping");
            stream.write_all(b"pong").await.map_err(io)?;
            stream.flush().await.map_err(io)
        };
        tokio::join!(reader, node)
    })
}

#[test]
fn members_speak_and_strangers_do_not() {
    for tls in [false, true] {
        let (one, other) = meet(with(TOKEN, tls), with(TOKEN, tls));
        one.unwrap();
        other.unwrap();
        let (one, other) = meet(with(OTHER, tls), with(TOKEN, tls));
        for error in [one.unwrap_err(), other.unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
            assert!(error.to_string().contains("another group token"), "{error}");
        }
    }
    let (one, other) = meet(Trust::anyone(), Trust::anyone());
    one.unwrap();
    other.unwrap();
    // Who says anything else than a proof has none.
    let (one, other) = meet(Trust::anyone(), with(TOKEN, false));
    assert!(one.is_err());
    assert!(other.unwrap_err().to_string().contains("--group-token-file"));
    // One side with TLS only.
    let (one, other) = meet(with(TOKEN, true), with(TOKEN, false));
    assert!(one.is_err() && other.is_err());
    let (one, other) = meet(with(TOKEN, false), with(TOKEN, true));
    assert!(one.is_err());
    assert!(other.unwrap_err().to_string().contains("--tls"), "says what to do");
}
