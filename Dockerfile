# The studio as an image: not root, with a health check and an init that reaps the jobs' processes.
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 switchyard \
    && mkdir /data && chown switchyard /data

WORKDIR /switchyard
COPY requirements.txt requirements-models.txt requirements-no-deps.txt ./
RUN pip install --no-cache-dir -r requirements.txt -r requirements-models.txt \
    && pip install --no-cache-dir --no-deps -r requirements-no-deps.txt
COPY app app
COPY engine engine
COPY pages pages
COPY sample_traces sample_traces

USER switchyard
# A cluster starts its ranks with this image too, as whoever wrote the run folder and in whatever folder it likes:
# `python -m torch.distributed.run … --module engine.launch.worker FOLDER`, or `python -m engine.launch.running.node …`.
ENV SWITCHYARD_DATA=/data OPENBLAS_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH=/switchyard
RUN python -m engine.simulate.compile_ahead
VOLUME /data
EXPOSE 8501
# Whether the studio answers, its disk has room and its database is there.
HEALTHCHECK --interval=120s --timeout=40s --start-period=30s \
    CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8501/_stcore/health', timeout=4)" \
    && python -m engine health
ENTRYPOINT ["tini", "--"]
# Inside the container every interface is the container's own; publish the port on 127.0.0.1 of the host.
CMD ["streamlit", "run", "app/main.py", "--server.address", "0.0.0.0", "--server.port", "8501", "--", "--sample"]
