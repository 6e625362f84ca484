//! A relay before a TCP peer that can stop to forward: it goes on taking bytes, and closes nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A relay; dropping it ends its connections.
#[derive(Debug)]
pub struct Relay {
    /// Where it listens, as ZMQ writes it.
    pub endpoint: String,
    is_stuck: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Relay {
    /// Listens before `peer`, a ZMQ endpoint.
    ///
    /// # Errors
    ///
    /// It cannot listen, or the endpoint is none of TCP.
    pub async fn before(peer: &str) -> anyhow::Result<Self> {
        let peer = peer.strip_prefix("tcp://").with_context(|| peer.to_owned())?.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let endpoint = format!("tcp://{}", listener.local_addr()?);
        let is_stuck = Arc::new(AtomicBool::new(false));
        let stuck = Arc::clone(&is_stuck);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((from, _)) = listener.accept().await {
                // A connection that comes later is as good as new.
                stuck.store(false, Ordering::Release);
                let Ok(to) = TcpStream::connect(&peer).await else { continue };
                let (client, to_client) = from.into_split();
                let (engine, to_engine) = to.into_split();
                connections.spawn(forward(client, to_engine, None));
                connections.spawn(forward(engine, to_client, Some(Arc::clone(&stuck))));
            }
        });
        Ok(Self { endpoint, is_stuck, task })
    }

    /// Stops to forward what comes from the peer on every connection that is open now.
    pub fn stick(&self) {
        self.is_stuck.store(true, Ordering::Release);
    }
}

/// Forwards bytes until an end closes; once it is told to stop it only takes them.
async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, stop: Option<Arc<AtomicBool>>) {
    let mut buffer = vec![0; 1 << 16];
    let mut is_stuck = false;
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        is_stuck |= stop.as_ref().is_some_and(|stop| stop.load(Ordering::Acquire));
        if !is_stuck && to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
