# A small image with the release binary:   docker build -t metainfer .
#   docker run -p 8000:8000 -v /models:/models metainfer serve --engine /models/mini-m3-engine --host 0.0.0.0
FROM debian:12 AS build
WORKDIR /src
COPY . .
RUN bash scripts/setup build && bash scripts/build && strip build/release/metainfer

FROM debian:12-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends \
      libssl3 libyaml-cpp0.7 libfmt9 libspdlog1.10 libprometheus-cpp-core1.0 libxxhash0 ca-certificates && \
    rm -rf /var/lib/apt/lists/* && useradd --system --uid 10001 --create-home metainfer
COPY --from=build /src/build/release/metainfer /usr/local/bin/metainfer
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30m CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000 && printf 'GET /health HTTP/1.0\\r\\n\\r\\n' >&3 && IFS= read -r line <&3 && [[ $line == *' 200 '* ]]"]
ENTRYPOINT ["/usr/local/bin/metainfer"]
CMD ["--help"]
